"""Linear attention with decaying matrix states, and the delta rule, computed in chunks of tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.recurrent.base import EpisodeRuns
from rlxf.attention.recurrent.scan import linear_scan

CHUNK = 64
"""Tokens of a chunk with one decay per head: pairs within a chunk cost as much as its state."""

CHANNEL_CHUNK = 16
"""Tokens of a chunk with a decay per key channel, which needs (C, C, K) decays."""


def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, runs: EpisodeRuns, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``S_t = diag(exp(g_t)) S_(t-1) + k_t v_t^T`` and ``y_t = q_t S_t`` for all t.

    Args:
        q: queries, (B, T, H, K).
        k: keys, (B, T, H, K).
        v: values, (B, T, H, V).
        log_decay: g, at most 0: (B, T, H, 1), or (B, T, H, K) for a decay per key channel.
        runs: episodes of the tokens.
        state: S_0, (B, H, K, V).

    Returns:
        y (B, T, H, V), 0 at empty slots without older tokens, and S_T.
    """
    length = q.shape[1]
    size = min(length, CHUNK if log_decay.shape[-1] == 1 else CHANNEL_CHUNK)
    chunks = Chunks.split(log_decay.to(state.dtype), runs, size)
    dtype = q.dtype
    q, k, v = (to_chunks(x.to(state.dtype), size) for x in (q, runs.inputs(k), v))
    pairs, carry = chunks.pair_decays(), chunks.state_decays()
    added = (k * pairs[..., -1, :, :]).mT @ v
    states = linear_scan(carry[..., -1, :, None], added, state)
    before = state[:, None]
    if states.shape[1] > 1:  # else a copy of the state would take as long as the products
        before = torch.cat([before, states[:, :-1]], dim=1)
    y = _scores(q, k, pairs) @ v + (q * carry) @ before
    return from_chunks(y, length).to(dtype), states[:, -1]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    runs: EpisodeRuns,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute ``S_t = exp(g_t) (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T``, ``y_t = q_t S_t``.

    Within a chunk, the corrected values of all tokens solve one triangular system (Yang et al. 2024,
    arXiv:2406.06484, section 3.2; with decay arXiv:2412.06464, section 3.3).

    Args:
        q: queries, (B, T, H, K).
        k: keys of norm 1, (B, T, H, K).
        v: values, (B, T, H, V).
        beta: step sizes, (B, T, H), from 0 to 2.
        log_decay: g, at most 0, (B, T, H).
        runs: episodes of the tokens.
        state: S_0, (B, H, K, V).

    Returns:
        y (B, T, H, V), undefined at empty slots, and S_T.
    """
    length = q.shape[1]
    size = min(length, CHUNK)
    chunks = Chunks.split(log_decay.to(state.dtype)[..., None], runs, size)
    pairs, carry = chunks.pair_decays(), chunks.state_decays()
    dtype = q.dtype
    q, k, v, step = (to_chunks(x.to(state.dtype), size) for x in (q, k, v, runs.inputs(beta)[..., None]))
    errors = ((step * k) @ k.mT * pairs[..., 0]).tril(-1)
    known = torch.cat([step * v, step * carry * k], dim=-1)
    if size > 1:  # a single token has no errors to correct
        known = torch.linalg.solve_triangular(errors, known, upper=False, unitriangular=True)
    corrected, predicted = known.split([v.shape[-1], k.shape[-1]], dim=-1)
    kept = carry[..., -1, :, None]
    written = (k * pairs[..., -1, :, :]).mT
    read = q * carry
    scores = _scores(q, k, pairs)
    outputs = []
    # The backward pass of a slice x[:, chunk] would fill a tensor of all tokens for each chunk.
    by_chunk = (x.unbind(1) for x in (corrected, predicted, read, scores, kept, written))
    for fixed, factor, query, score, decay, key in zip(*by_chunk, strict=True):
        values = fixed - factor @ state
        outputs.append(query @ state + score @ values)
        state = decay * state + key @ values
    return from_chunks(torch.stack(outputs, dim=1), length).to(dtype), state


@dataclass(frozen=True, eq=False)
class Chunks:
    """Decays between tokens in N chunks of C tokens each.

    Args:
        number: (B, N, C), number of resets up to each token.
        before: (B, N), number of resets before each chunk.
        valid: (B, N, C) bool, false for empty slots and padding.
        log_decay: (B, N, H, C, G), logarithm of the decay of each token; G is 1 or K. It is 0 at resets,
            empty slots and padding.
    """

    number: Tensor
    before: Tensor
    valid: Tensor
    log_decay: Tensor

    @classmethod
    def split(cls, log_decay: Tensor, runs: EpisodeRuns, size: int) -> "Chunks":
        """Split T tokens with log decays (B, T, H, G) into chunks of ``size`` tokens."""
        padding = (0, -runs.number.shape[1] % size)
        number = F.pad(runs.number[:, None].double(), padding, mode="replicate")[:, 0].long()
        number = number.unflatten(1, (-1, size))
        before = F.pad(number[:, :-1, -1], (1, 0))
        valid = F.pad(runs.valid, padding).unflatten(1, (-1, size))
        kept = (runs.valid & ~runs.reset)[..., None, None]
        return cls(number, before, valid, to_chunks(log_decay.masked_fill(~kept, 0), size))

    def pair_decays(self) -> Tensor:
        """Return the decays from token j to token i, 0 for j > i, empty slots j and other episodes.

        Log decays are summed over the tokens after j up to i. The difference of two prefix sums would lose
        precision in float32 after strong decays.

        Returns:
            (B, N, H, C, C, G), with axes i and j.
        """
        size = self.number.shape[-1]
        lower = torch.ones(size, size, dtype=torch.bool, device=self.number.device).tril()
        steps = self.log_decay[..., None, :].expand(*self.log_decay.shape[:-1], size, -1)
        sums = steps.masked_fill(~lower.tril(-1)[..., None], 0).cumsum(dim=-3)
        visible = lower & self.valid[:, :, None] & (self.number[..., None] == self.number[:, :, None])
        return sums.exp().masked_fill(~visible[:, :, None, ..., None], 0)

    def state_decays(self) -> Tensor:
        """Return the decay of the state before a chunk up to each token, 0 after a reset, (B, N, H, C, G)."""
        continues = self.number == self.before[..., None]
        return self.log_decay.cumsum(dim=-2).exp() * continues[:, :, None, :, None]


def to_chunks(x: Tensor, size: int) -> Tensor:
    """Split x (B, T, H, D) into chunks (B, N, H, size, D), padded with zeros."""
    return F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size)).transpose(2, 3)


def from_chunks(x: Tensor, length: int) -> Tensor:
    """Join chunks (B, N, H, C, D) and drop the padding: (B, T, H, D)."""
    return x.transpose(2, 3).flatten(1, 2)[:, :length]


def _scores(q: Tensor, k: Tensor, pairs: Tensor) -> Tensor:
    """Return products of queries and decayed keys within chunks, (B, N, H, C, C)."""
    if pairs.shape[-1] == 1:
        return q @ k.mT * pairs[..., 0]
    return torch.einsum("...ik,...jk,...ijk->...ij", q, k, pairs)
