"""Locality-sensitive hashing attention with shared queries and keys (Reformer)."""

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.attention import Attention, Projected
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.attention_options import AttentionArguments
from rlxf.attention.kernels.base import (
    LinearFn,
    PairwiseKernel,
    check_full_pattern,
    check_key_heads,
)
from rlxf.attention.kernels.bucket_attention import (
    BucketAttention,
    ComparePositions,
    check_bucket_numbers,
    count_shared_rounds,
)
from rlxf.attention.linear import mixed_linear, orthogonal_linear
from rlxf.attention.technique import AttentionFactory, SpecView
from rlxf.attention.token_index import TokenIndex
from rlxf.utils.checks import check_int, check_seed

FEATURES_PER_STEP = 1 << 18
"""Number of rotated features that are computed at a time."""


@dataclass(frozen=True)
class LSH(PairwiseKernel):
    r"""Softmax among the tokens whose hash equals the query's in some round.

    In each round token i has the bucket ``h(x_i) = argmax [x_i R; -x_i R]``. R (D, b / 2) is random and
    fixed; x_i is the query before positions change it. The key of a token is its query, scaled to a
    different length (`SharedQKAttention`). Then

    ``o_i = sum_j exp(q_i . q_j / |q_j|) v_j / z_i`` over the tokens j whose bucket is h(x_i) in some round,

    which is the paper's sum over rounds, with its ``- log N_ij`` for pairs that share N_ij of them. A token
    attends to itself only if no other token is visible.

    The paper sorts all tokens by bucket and cuts them into chunks; a token attends to the tokens of its
    bucket in its chunk and in the previous one. Later tokens thus determine which earlier tokens are visible.
    Here a token attends to all earlier tokens of its bucket, and acting matches training: this causal form is
    rlxf's variant. It costs more where buckets are uneven. R is drawn once; the paper draws a new R for each
    pass, which acting could not reproduce.

    With ``chunk``, a bidirectional transformer computes what published code does: a token attends to its
    chunk and the previous one, whatever the bucket, and counts a key once for each round in which it attends
    to it. This form is for weights trained with that code; it computes all pairs.

    Tokens are sorted by bucket if there are many pairs, the pattern is `Full`, positions add nothing to
    scores and there is no dropout; otherwise all pairs are computed.

    Source: Kitaev et al. 2020, arXiv:2001.04451, section 2 and appendix A.

    Args:
        rounds: number of hashes; 1 to 8 in the paper.
        buckets: b, number of values of a hash; even. The paper uses 2 L / chunk for L tokens, with chunks of
            64.
        chunk: tokens per chunk, in the published form; None for whole buckets.
        seed: seed of R, which is the same in all layers and different in all heads.

    Raises:
        TypeError: if an option is not an integer.
        ValueError: if rounds or chunk is less than 1, buckets is less than 2 or odd, or seed is less than 0;
            in a pass, if the dtype does not represent all numbers up to ``buckets / 2``.
    """

    paper: ClassVar[str] = "Kitaev et al. 2020, arXiv:2001.04451"
    causal_form: ClassVar[str] = "rlxf's"
    cost: ClassVar[str] = "rounds L^2 / buckets pairs"
    rounds: int = 4
    buckets: int = 8
    chunk: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("LSH rounds", self.rounds)
        check_int("LSH buckets", self.buckets, least=2)
        check_seed("LSH seed", self.seed)
        if self.chunk is not None:
            check_int("LSH chunk", self.chunk)
        if self.buckets % 2:
            raise ValueError(f"LSH buckets must be even, got {self.buckets}")

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless all tokens can share one projection of queries and keys."""
        if choices.cross_attention:
            raise ValueError(
                f"{self} uses one projection for queries and keys, and with cross_attention=True they are "
                f"from different sequences; choose another kernel"
            )
        if len(choices.pattern.query_rules) > 1:
            raise ValueError(
                f"{self} uses one projection for queries and keys, and {choices.pattern} has separate ones "
                f"for global tokens; choose another pattern or kernel"
            )
        if choices.qk_norm is not None:
            raise ValueError(
                f"{self} scales keys to the length sqrt(D) and does not support qk_norm={choices.qk_norm!r}; "
                f"use qk_norm=None or another kernel"
            )
        check_key_heads(self, choices)
        if self.chunk is not None:
            check_full_pattern(self, "chunk", choices)

    def attention_class(self, default: AttentionFactory) -> AttentionFactory:
        return SharedQKAttention

    def build(self, width: int, heads: int) -> "LSHAttention":
        kind = LSHAttention if self.chunk is None else ChunkedLSHAttention
        return kind(self, heads, width // heads)


class SharedQKAttention(Attention):
    """Attention whose keys are its queries, scaled to length sqrt(D); ``qkv`` (2 C, C) projects q and v.

    Scores ``q_i . k_j / sqrt(D)`` are therefore ``q_i . q_j / |q_j|``, as in the authors' code.

    Source: Kitaev et al. 2020, arXiv:2001.04451, section 2, "Shared-QK".
    """

    def __init__(self, arguments: AttentionArguments):
        super().__init__(arguments)
        self.qkv = orthogonal_linear(self.width, self.width, matrices=2)

    def project(self, x: Tensor, linear: LinearFn = mixed_linear) -> Projected:
        """Project queries, values and extra query features; `as_key` converts the queries to keys."""
        q, v = self.split(self.project_part(x, slice(None), linear))
        extras = self.kernel.projected_query_extras(q)
        return (q, v) if extras is None else (q, v, extras)

    def as_key(self, k: Tensor) -> Tensor:
        """Scale queries to length sqrt(D)."""
        return F.rms_norm(k, (self.size,), eps=1e-6)

    def _project_jointly(self, x: Tensor) -> tuple[Tensor, Projected]:
        q, v, *extras = self.project(x)
        return torch.cat([q, *extras], dim=-1), (q, v, *extras)


class LSHAttention(BucketAttention):
    """Module of `LSH` in one layer; ``rotations`` (H, D, R, b / 2) are fixed."""

    def __init__(self, spec: LSH, heads: int, size: int):
        super().__init__(spec.rounds)
        self.spec = spec
        generator = torch.Generator().manual_seed(spec.seed)
        shape = (heads, size, spec.rounds, spec.buckets // 2)
        self.register_buffer("rotations", torch.randn(shape, generator=generator))
        self.rotations: Tensor

    def projected_query_extras(self, q: Tensor) -> Tensor:
        """Return the buckets of queries (B, H, T, D): (B, H, T, R); those of keys are the same.

        Column m of R and its negative are the buckets ``m + 1`` and ``-(m + 1)``: bfloat16 represents those
        of up to 512 buckets exactly.
        """
        check_bucket_numbers(self.spec, self.spec.buckets // 2, q.dtype)
        size = max(1, FEATURES_PER_STEP // (q.shape[0] * self.rotations[:, 0].numel()))
        return torch.cat([self._hash(tokens) for tokens in q.split(size, dim=2)], dim=2)

    @torch.no_grad()
    def _hash(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        rotated = x.to(wide) @ self.rotations.to(wide).flatten(2)
        rotated = rotated.unflatten(-1, self.rotations.shape[2:])
        largest = rotated.abs().argmax(-1)
        negative = rotated.gather(-1, largest[..., None])[..., 0] < 0
        return torch.where(negative, -1 - largest, 1 + largest).to(x.dtype)

    def counts(self, query_buckets: Tensor, key_buckets: Tensor, mask: AttentionMask) -> Tensor:
        shared = (count_shared_rounds(query_buckets, key_buckets) > 0).int()  # ONNX adds no bools
        return _attend_to_self_if_alone(shared, mask)

    def compare_positions(self, mask: AttentionMask) -> ComparePositions:
        """Return the comparison: all other tokens, or earlier ones in a causal transformer."""
        return torch.gt if mask.causal else torch.ne

    def sorted_forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """Compute `forward` by sorting tokens; a token without other visible tokens attends to itself."""
        output, has_keys = super().sorted_forward(q, k, v, mask)
        slot = mask.key.find(mask.query)[:, None, :, None]
        own = v.gather(2, slot.clamp(min=0).expand(-1, v.shape[1], -1, v.shape[3]))
        return torch.where(has_keys | (slot < 0), output, own), has_keys


class ChunkedLSHAttention(LSHAttention):
    """Module of `LSH` with ``chunk`` in one layer."""

    def counts(self, query_buckets: Tensor, key_buckets: Tensor, mask: AttentionMask) -> Tensor:
        half = self.spec.buckets // 2
        chunk = self.spec.chunk
        assert chunk is not None
        buckets = torch.where(key_buckets > 0, key_buckets - 1, half - 1 - key_buckets).long()
        return _attend_to_self_if_alone(count_in_chunks(buckets, mask, chunk), mask)

    def uses_sorting(self, mask: AttentionMask) -> bool:
        """Return False: all pairs are computed."""
        return False


def _attend_to_self_if_alone(counts: Tensor, mask: AttentionMask) -> Tensor:
    """Mask counts (B, H, Tq, Tk); a token counts itself once if no other key counts, else not at all."""
    itself = mask.allowed_by_head & (mask.distance == 0)[:, None]
    counts = counts * (mask.allowed_by_head & ~itself)
    alone = ~(counts > 0).any(-1, keepdim=True)
    return counts + (alone & itself)


def count_in_chunks(buckets: Tensor, mask: AttentionMask, chunk: int) -> Tensor:
    """Count how often each key is in the query's chunk or in the previous chunk, over all rounds.

    In each round the tokens of an episode are sorted by bucket and position and cut into chunks; the last
    chunk may be shorter. The chunk before the first chunk of a round is the last chunk of the previous round.
    The chunk before the very first chunk is the very last.

    Args:
        buckets: buckets of the keys, (B, H, Tk, R) int64.
        mask: attention mask; the queries are among the keys.
        chunk: tokens per chunk.

    Returns:
        (B, H, Tq, Tk) int64; undefined for pairs of different episodes.
    """
    own, previous = _chunks(buckets, mask.key, chunk)
    slot = mask.key.find(mask.query).clamp(min=0)[:, None, :, None]
    slot = slot.expand(-1, own.shape[1], -1, own.shape[3])
    return _count_equal(own.gather(2, slot), own) + _count_equal(previous.gather(2, slot), own)


def _chunks(buckets: Tensor, index: TokenIndex, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the chunk of each token and the previous chunk, (B, H, T, R), numbered across rounds."""
    rounds = buckets.shape[-1]
    episode = index.episode
    span = int(index.position.max()) + 1
    bucket = episode[:, None, :, None] * (int(buckets.max()) + 1) + buckets
    rank = (bucket * span + index.position[:, None, :, None]).argsort(2).argsort(2)
    earlier = (episode[:, None] < episode[:, :, None]).sum(-1)
    length = (episode[:, None] == episode[:, :, None]).sum(-1)
    chunks = ((length + chunk - 1) // chunk)[:, None, :, None]
    number = (rank - earlier[:, None, :, None]) // chunk
    number = number + chunks * torch.arange(rounds, device=buckets.device)
    return number, (number - 1) % (rounds * chunks)


def _count_equal(a: Tensor, b: Tensor) -> Tensor:
    """Count how many of the numbers a (..., Tq, R) are among those of b (..., Tk, R): (..., Tq, Tk)."""
    pairs = product(a.unbind(-1), b.unbind(-1))
    return torch.stack([x[..., :, None] == y[..., None, :] for x, y in pairs]).sum(0)
