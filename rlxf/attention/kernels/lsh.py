"""Reformer's attention: tokens see those whose hash is theirs."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.checks import check_seed, check_whole
from rlxf.attention.kernels.base import PairwiseKernel, check_whole_sequence
from rlxf.attention.kernels.buckets import BucketAverage, Meets, shared_rounds
from rlxf.attention.kernels.chunks import times_in_chunks
from rlxf.attention.patterns.base import GlobalTokens
from rlxf.attention.relation import Relation, find_slots
from rlxf.attention.technique import Choices

SLAB = 1 << 18
"""Rotated features that are held at a time."""


@dataclass(frozen=True)
class LSH(PairwiseKernel):
    r"""Softmax among the tokens whose hash is the query's in some round.

    In each of several rounds token i has the bucket ``h(x_i) = argmax [x_i R; -x_i R]``: R (D, b / 2) is
    random and fixed, x_i is its query before positions change it. Its key is that query, brought to another
    length (`SharedAttention`). Then

    ``o_i = sum_j exp(q_i . q_j / |q_j|) v_j / z_i`` over the tokens j whose bucket is h(x_i) in some round,

    which is the paper's sum over rounds, with its ``- log N_ij`` for pairs that share N_ij of them. A token
    sees itself only if there is nothing else to see.

    The paper sorts all tokens by bucket and cuts them into chunks; a token sees what of its bucket stands
    in its chunk and in the one before. So later tokens decide which earlier ones it sees. Here it sees all
    of its bucket that it may, and acting equals learning: this causal form is ours. It costs more where
    buckets are uneven. R is drawn once; the paper draws anew for each pass, which acting could not repeat.

    With ``chunk``, a bidirectional transformer computes what published code does: a token sees its chunk and
    the one before, whatever the bucket, once for each round that shows it. That is here for weights trained
    so; all pairs are computed.

    Tokens are sorted by their buckets where pairs are many, the pattern is `Full`, positions add nothing to
    scores and nothing is dropped out; otherwise all pairs are weighed.

    Source: Kitaev et al. 2020, arXiv:2001.04451, section 2 and appendix A.

    Args:
        rounds: number of hashes; the paper takes 1 to 8.
        buckets: b, values of a hash; even. The paper takes 2 L / chunk for L tokens, with chunks of 64.
        chunk: tokens of a chunk, in the published form; None for whole buckets.
        seed: of R, the same in all layers and different in all heads.

    Raises:
        TypeError: if one of them is no whole number.
        ValueError: if rounds or chunk is less than 1, buckets less than 2 or odd, or seed less than 0.
    """

    paper: ClassVar[str] = "Kitaev et al. 2020, arXiv:2001.04451"
    causal: ClassVar[str] = "ours"
    cost: ClassVar[str] = "rounds L^2 / buckets pairs"
    rounds: int = 4
    buckets: int = 8
    chunk: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("LSH rounds", self.rounds)
        check_whole("LSH buckets", self.buckets, least=2)
        check_seed("LSH seed", self.seed)
        if self.chunk is not None:
            check_whole("LSH chunk", self.chunk)
        if self.buckets % 2:
            raise ValueError(f"LSH buckets must be even, got {self.buckets}")

    def check(self, choices: Choices) -> None:
        """See `Kernel`: all tokens may share one projection of queries and keys."""
        if choices.cross_attention:
            raise ValueError(
                f"{self} takes a token's query for its key, and cross_attention=True looks at tokens that do "
                f"not ask; choose another kernel"
            )
        if isinstance(choices.pattern, GlobalTokens):
            raise ValueError(
                f"{self} has one projection of queries and keys, and {choices.pattern} has others for global "
                f"tokens; choose another pattern or kernel"
            )
        if self.chunk is not None:
            check_whole_sequence(self, "chunk", choices)

    def build(self, width: int, heads: int) -> "LSHAverage":
        """See `Kernel`."""
        kind = LSHAverage if self.chunk is None else ChunkedLSH
        return kind(self, heads, width // heads)


class LSHAverage(BucketAverage):
    """An `LSH` in one layer; ``rotations`` (H, D, R, b / 2) are fixed."""

    def __init__(self, spec: LSH, heads: int, size: int):
        super().__init__(spec.rounds)
        self.spec = spec
        generator = torch.Generator().manual_seed(spec.seed)
        shape = (heads, size, spec.rounds, spec.buckets // 2)
        self.register_buffer("rotations", torch.randn(shape, generator=generator))
        self.rotations: Tensor

    def query_notes(self, q: Tensor) -> Tensor:
        """The buckets of queries (B, H, T, D), (B, H, T, R); those of keys are the same.

        ``+- (m + 1)`` for the m-th column of R and its negative: bfloat16 holds those up to 512 buckets.
        """
        some = max(1, SLAB // (q.shape[0] * self.rotations[:, 0].numel()))
        return torch.cat([self._hash(part) for part in q.split(some, dim=2)], dim=2)

    @torch.no_grad()
    def _hash(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        rotated = x.to(wide) @ self.rotations.to(wide).flatten(2)
        rotated = rotated.unflatten(-1, self.rotations.shape[2:])
        largest = rotated.abs().argmax(-1)
        negative = rotated.gather(-1, largest[..., None])[..., 0] < 0
        return torch.where(negative, -1 - largest, 1 + largest).to(x.dtype)

    def counts(self, of_queries: Tensor, of_keys: Tensor, relation: Relation) -> Tensor:
        """See `BucketAverage`."""
        return _itself_last(shared_rounds(of_queries, of_keys) > 0, relation)

    def meets(self, relation: Relation) -> Meets:
        """All others, or those before."""
        return torch.gt if relation.causal else torch.ne

    def among_buckets(
        self, q: Tensor, of_queries: Tensor, k: Tensor, of_keys: Tensor, v: Tensor, relation: Relation
    ) -> Tensor:
        """See `BucketAverage`."""
        mixed, seen = self.found(q, of_queries, k, of_keys, v, relation)
        slot = find_slots(relation.key, relation.query)[:, None, :, None]
        own = v.gather(2, slot.clamp(min=0).expand(-1, v.shape[1], -1, v.shape[3]))
        return torch.where(seen | (slot < 0), mixed, own)


class ChunkedLSH(LSHAverage):
    """An `LSH` with a ``chunk`` in one layer."""

    def counts(self, of_queries: Tensor, of_keys: Tensor, relation: Relation) -> Tensor:
        """See `BucketAverage`."""
        half, chunk = self.spec.buckets // 2, self.spec.chunk
        assert chunk is not None
        buckets = torch.where(of_keys > 0, of_keys - 1, half - 1 - of_keys).long()
        return _itself_last(times_in_chunks(buckets, relation, chunk), relation)

    def sorts(self, relation: Relation) -> bool:
        """Never."""
        return False


def _itself_last(counts: Tensor, relation: Relation) -> Tensor:
    """Counts (B, H, Tq, Tk) where allowed; of a token itself 1 if it sees nothing else, 0 otherwise."""
    itself = relation.allowed_by_head & (relation.distance == 0)[:, None]
    counts = counts * (relation.allowed_by_head & ~itself)
    alone = ~(counts > 0).any(-1, keepdim=True)
    return counts + (alone & itself)
