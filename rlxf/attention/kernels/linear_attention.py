"""Linear attention with weights that are products of features; base of Performer and RFA."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.base import (
    Kernel,
    RecurrentAttentionKernel,
    RecurrentKernel,
    RecurrentKernelState,
)
from rlxf.attention.kernels.kv_state import (
    KeyFeatures,
    KVState,
    append_ones,
    causal_sums,
    pairwise_sums,
    scan_chunk,
)
from rlxf.attention.technique import layer_seed
from rlxf.attention.token_index import EMPTY, TokenIndex, is_tracing

CAUSAL_CHUNK = 128
"""Tokens per chunk of causal attention; pairs are computed only within a chunk."""

BIDIRECTIONAL_CHUNK = 256
"""Tokens per chunk of bidirectional attention, which computes no pairs; a chunk fits a processor's cache."""

MAX_PAIRS = 1 << 16
"""Number of query-key pairs up to which computing all pairs at once is faster."""


class RandomFeatures(RecurrentKernel):
    """Base of the kernels with random features."""

    seed: int

    @abstractmethod
    def build(self, width: int, heads: int) -> "LinearAttention":
        """Return the module of one layer."""

    def for_layers(self, layers: int) -> tuple[Kernel, ...]:
        """Return a kernel for each layer, with consecutive seeds that start at the kernel's own."""
        options: Any = self
        return tuple(replace(options, seed=layer_seed(self.seed, layer)) for layer in range(layers))


class LinearAttention(RecurrentAttentionKernel):
    """``o_i = sum_j w_ij v_j / sum_j w_ij`` over visible keys j, with ``w_ij = phi(q_i) . phi(k_j)``.

    There are three implementations. The first computes all pairs, for any pattern, memory and episodes. The
    second uses `KVState`, in time and memory linear in the length, where each token of a row attends to all
    of the row or to its past. The third processes one token at a time, with `KVState` as recurrent state. The
    last two do not compute all weights, so none of the three applies the transformer's dropout to weights.
    """

    features: int
    """Number of features M."""

    precision: ClassVar[torch.dtype] = torch.float32
    """Lowest precision of features and sums."""

    @abstractmethod
    def quotient(self, result: Tensor) -> Tensor:
        """Compute the average (..., V) from the result (..., V + 2) of `pairwise_sums` or `causal_sums`.

        That result contains the numerator, the denominator, and the sum of squared norms of key features.
        """

    def promote(self, x: Tensor) -> Tensor:
        """Convert x to at least `precision`, which exponents and long sums need."""
        return x.to(torch.promote_types(x.dtype, self.precision))

    @abstractmethod
    def query_features(self, q: Tensor) -> Tensor:
        """Return phi of queries (B, H, T, D), up to a factor for each query: (B, H, T, M)."""

    def key_features(self, k: Tensor) -> KeyFeatures:
        """Return phi of keys (B, H, T, D + F), which `contextualize_keys` has transformed.

        By default they are computed as for queries, with scale 0.
        """
        return KeyFeatures(self.query_features(k), k.new_zeros(k.shape[:-1], dtype=self.promote(k).dtype))

    def contextualize_keys(self, k: Tensor, index: TokenIndex) -> Tensor:
        """Transform keys (B, H, S, D + F) by terms that depend on the other keys; by default not at all."""
        return k

    def log_decay(self, k: Tensor) -> Tensor:
        """Return the logarithm of the factor by which each key decays all earlier keys, (B, H, S) float64.

        Keys are (B, H, S, D + F). It is 0 by default: no decay.
        """
        return k.new_zeros(k.shape[:-1], dtype=torch.float64)

    def allows_gathering(self, mask: AttentionMask) -> bool:
        """Return whether keys may be gathered: not if `forward` uses running sums."""
        return not uses_running_sums(mask)

    def transform_in_context(self, q: Tensor, k: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        return q, self.contextualize_keys(k, mask.key)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: AttentionMask) -> Tensor:
        values = append_ones(self.promote(v))
        if uses_running_sums(mask):
            sums = self._by_sums(q, k, values, mask)
        else:
            sums = pairwise_sums(self.query_features(q), self.key_features(k), values, mask.allowed_by_head)
        return self.quotient(sums).to(v.dtype)

    def _by_sums(self, q: Tensor, k: Tensor, values: Tensor, mask: AttentionMask) -> Tensor:
        empty = mask.key.episode == EMPTY
        values = values.masked_fill(empty[:, None, :, None], 0.0)
        attend = self._causal if mask.causal else self._bidirectional
        return torch.cat(list(attend(q, k, values, empty)), dim=2)

    def _causal(self, q: Tensor, k: Tensor, values: Tensor, empty: Tensor) -> Iterator[Tensor]:
        """Yield the results of queries over the keys up to their own; q belongs to the last tokens of k."""
        earlier = k.shape[2] - q.shape[2]
        size = CAUSAL_CHUNK
        sizes = [*chunk_sizes(earlier, size), *chunk_sizes(q.shape[2], size)]
        parts = split_keys(k, values, empty, sizes)
        sums = KVState.empty(self.features, values)
        for _ in chunk_sizes(earlier, size):
            sums = self._updated(sums, *next(parts))
        for queries in q.split(size, 2):
            result, sums = scan_chunk(self, queries, *next(parts), sums)
            yield result

    def _bidirectional(self, q: Tensor, k: Tensor, values: Tensor, empty: Tensor) -> Iterator[Tensor]:
        """Yield the results of queries over all keys."""
        sums = KVState.empty(self.features, values)
        for part in split_keys(k, values, empty, BIDIRECTIONAL_CHUNK):
            sums = self._updated(sums, *part)
        for queries in q.split(BIDIRECTIONAL_CHUNK, 2):
            result = self.query_features(queries) @ sums.total
            yield torch.cat([result, sums.energy.expand(-1, -1, result.shape[2], -1)], dim=-1)

    def _updated(self, sums: KVState, k: Tensor, values: Tensor, empty: Tensor) -> KVState:
        return sums.add(self.key_features(k).exclude(empty), values)

    def prefill(self, k: Tensor, v: Tensor, index: TokenIndex) -> "LinearAttentionState":
        """Return the recurrent state of the last episode: later tokens attend to no other episode."""
        none = KVState.empty(self.features, append_ones(self.promote(v)))
        memory = LinearAttentionState(none, index.newest().episode[:, 0])
        keys, values, _ = self._scaled_to_last(k, v, index.episode != memory.episode[:, None], index)
        memory.sums = none.add(keys, values)
        return memory

    def step(self, q: Tensor, k: Tensor, v: Tensor, index: TokenIndex, state: RecurrentKernelState) -> Tensor:
        assert isinstance(state, LinearAttentionState)
        keys, values, log_decay = self._scaled_to_last(k, v, index.episode == EMPTY, index)
        before = state.advance_to(index, log_decay)
        state.sums = before.add(keys, values)
        return self.quotient(causal_sums(self.query_features(q), keys, values, before)[0]).to(v.dtype)

    def _scaled_to_last(
        self, k: Tensor, v: Tensor, excluded: Tensor, index: TokenIndex
    ) -> tuple[KeyFeatures, Tensor, Tensor]:
        """Return keys scaled to the last of S tokens, their values, and their joint log decay (B, H).

        Args:
            k: (B, H, S, D + F).
            v: (B, H, S, V).
            excluded: tokens to exclude, (B, S) bool.
            index: position and episode of the tokens.
        """
        values = append_ones(self.promote(v)).masked_fill(excluded[:, None, :, None], 0.0)
        log_decay = self.log_decay(k).masked_fill(excluded[:, None], 0.0).sum(-1)
        keys = self.key_features(self.contextualize_keys(k, index))
        scale = (keys.scale + log_decay[..., None]).to(values.dtype)
        return KeyFeatures(keys.features, scale).exclude(excluded), values, log_decay


@dataclass(eq=False)
class LinearAttentionState(RecurrentKernelState):
    """Recurrent state of one layer: a summary of all tokens of an episode.

    Args:
        sums: sums over their keys and values.
        episode: (B,) int64, number of the episode; `EMPTY` if there is none yet.
    """

    sums: KVState
    episode: Tensor

    def rows(self, rows: Tensor) -> "LinearAttentionState":
        return LinearAttentionState(KVState(*(part[rows] for part in self.sums)), self.episode[rows])

    def advance_to(self, index: TokenIndex, log_decay: Tensor) -> KVState:
        """Advance to the episode of the next token (B, 1); return the sums that it reads.

        They are decayed, or empty for a new episode.

        Args:
            index: position and episode of the token.
            log_decay: logarithm of the factor that the token applies, (B, H).
        """
        episode = torch.where(index.episode == EMPTY, self.episode[:, None], index.episode)[:, 0]
        is_new = episode != self.episode
        self.episode = episode
        return self.sums.decayed(log_decay, is_new)


def uses_running_sums(mask: AttentionMask) -> bool:
    """Return whether `LinearAttention` uses running sums in place of pairs of queries and keys.

    It does so if there are more than `MAX_PAIRS` pairs, and each token attends to all other tokens of its
    row, or to its past. This requires the rule `Full`, one episode in each row, apart from empty slots, and a
    mask without the precomputed distance tables of acting. In a causal transformer positions must be
    consecutive, and the queries must be the last keys. A selection of queries is computed pair by pair.
    """
    large = mask.query.shape[1] * mask.key.shape[1] > MAX_PAIRS
    if (
        not large
        or is_tracing()
        or mask.tables is not None
        or not all(rule.allows_all_keys for rule in mask.head_patterns)
    ):
        return False
    episode = mask.key.concatenate(mask.query).episode
    one = bool(((episode == EMPTY) | (episode == episode.amax(1, keepdim=True))).all())
    return one and (mask.aligned or not mask.causal)


def split_keys(
    k: Tensor, values: Tensor, empty: Tensor, size: int | list[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Split keys (B, H, T, D + F), their values (B, H, T, V + 1) and empty slots (B, T) along time."""
    return zip(k.split(size, 2), values.split(size, 2), empty.split(size, 1), strict=True)


def chunk_sizes(length: int, size: int) -> list[int]:
    """Split ``length`` into chunks of at most ``size``."""
    return [min(size, length - start) for start in range(0, length, size)]
