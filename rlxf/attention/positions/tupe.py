"""TUPE: separate score terms for content and positions, and an untied first token."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.positions.base import (
    LearnedPosition,
    PairwiseLayerPosition,
    PairwisePosition,
    PositionEmbedding,
)
from rlxf.attention.positions.t5_bias import check_buckets, two_sided_buckets
from rlxf.attention.token_index import TokenIndex
from rlxf.utils.checks import check_int

EXTRA_TOKENS_NOTE = ", including the extra global tokens of a bidirectional pattern"
"""Message part about extra global tokens, which have the first positions; see `LearnedGlobalTokens`."""


@dataclass(frozen=True)
class Tupe(LearnedPosition, PairwisePosition):
    r"""``s_ij = (q_i . k_j + (p_i U_Q) . (p_j U_K)) / sqrt(2 D) + b[h, bucket(i - j)]``.

    p is the layer norm of a learned vector for each position. Without buckets this is TUPE-A, with them
    TUPE-R. The first token of an episode, the paper's [CLS], is untied. Position terms with it as key are
    ``theta_2`` and a separate bucket; those with it as query are ``theta_1`` and another bucket. The position
    terms are computed once and added in all layers.

    The buckets are those of T5, one half for either side. The causal form is rlxf's variant: the half for
    later keys is unused. So is ``theta_1``, except with softmax1, as the first token attends to itself only.

    Source: Ke et al. 2021, arXiv:2006.15595, section 3; layer norm and buckets of the first token from the
    authors' code.

    Args:
        max_length: number of positions, in tokens. An episode must not be longer, including extra global
            tokens of a bidirectional pattern.
        buckets: number of buckets of distances; even. None: TUPE-A.
        max_distance: distance, in tokens, from which all keys share the last bucket.

    Raises:
        TypeError: if an option is not an integer.
        ValueError: if max_length is less than 1, buckets is odd or less than 4, or max_distance <= buckets //
            2; in a pass, if a position has no vector.
    """

    paper: ClassVar[str] = "Ke et al. 2021, arXiv:2006.15595"
    causal_form: ClassVar[str] = "rlxf's"
    max_length: int = 1024
    buckets: int | None = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("Tupe max_distance", self.max_distance)
        if self.buckets is not None:
            check_buckets("Tupe", self.buckets, self.max_distance)

    def build_embedding(self, width: int, heads: int) -> "TupePositions":
        return (TupePositions if self.buckets is None else TupeDistances)(self, width, heads)

    def build(self, width: int, heads: int) -> "TupeContent":
        return TupeContent()


class TupeContent(PairwiseLayerPosition):
    """Module of `Tupe` in one layer: ``q / sqrt(2)``, as the scale covers two terms."""

    def query(self, q: Tensor, position: Tensor) -> Tensor:
        return q * 2**-0.5


class TupePositions(PositionEmbedding):
    """Position vectors of TUPE-A, their layer norm, and the projections U_Q and U_K.

    Rows 0 and 1 of the vectors (max_length + 1, C) are for theta_1 and theta_2; position t has row t + 1.
    """

    def __init__(self, spec: Tupe, width: int, heads: int):
        super().__init__()
        self.spec, self.heads = spec, heads
        self.weight = nn.Parameter(torch.randn(spec.max_length + 1, width) * 0.02)
        self.norm = nn.LayerNorm(width)
        self.query_projection = orthogonal_linear(width, width)
        self.key_projection = orthogonal_linear(width, width)

    def table(self, distances: Tensor, causal: bool) -> Tensor:
        """Return ``p U_Q / sqrt(2 D)`` and ``p U_K`` of all positions, (2, max_length + 1, C)."""
        p = self.norm(self.weight)
        scale = (2 * self.weight.shape[1] / self.heads) ** -0.5
        return torch.stack([self.query_projection(p) * scale, self.key_projection(p)])

    def bias(self, mask: AttentionMask) -> Tensor:
        """Return the position terms, (B, H, Tq, Tk)."""
        assert mask.relative.shared is not None
        self.spec.check_positions(mask.query.filled_position, EXTRA_TOKENS_NOTE)
        self.spec.check_positions(mask.key.filled_position, EXTRA_TOKENS_NOTE)
        q, k = mask.relative.shared
        scores = self._rows(q, mask.query) @ self._rows(k, mask.key).transpose(-1, -2)
        theta = (q[:2] * k[:2]).unflatten(-1, (self.heads, -1)).sum(-1)
        return untie_first_token(mask, scores, *theta)

    def _rows(self, table: Tensor, index: TokenIndex) -> Tensor:
        """Return rows of a table (max_length + 1, C) for an index (B, T): (B, H, T, D)."""
        rows = nn.functional.embedding(index.filled_position + 1, table)
        return rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class TupeDistances(TupePositions):
    """`TupePositions` with the buckets b (n + 1, H) of TUPE-R.

    Pairs with the first token as key have the last bucket. Pairs with it as query have bucket n / 2, which no
    distance falls in.
    """

    def __init__(self, spec: Tupe, width: int, heads: int):
        super().__init__(spec, width, heads)
        assert spec.buckets is not None
        self.buckets = nn.Parameter(torch.zeros(spec.buckets + 1, heads))

    def bias(self, mask: AttentionMask) -> Tensor:
        """Return the position terms and the distance bias, (B, H, Tq, Tk)."""
        size = self.buckets.shape[0] - 1
        bucket_bias = self.buckets[two_sided_buckets(mask.relative.distances, size, self.spec.max_distance)]
        scores = mask.relative.lookup(bucket_bias.T)
        return super().bias(mask) + untie_first_token(
            mask, scores, self.buckets[size // 2], self.buckets[size]
        )


def untie_first_token(mask: AttentionMask, scores: Tensor, as_query: Tensor, as_key: Tensor) -> Tensor:
    """Return scores (B or 1, H, Tq, Tk) with those of the first token replaced: (B, H, Tq, Tk).

    Args:
        mask: positions of queries and keys.
        scores: scores of all tokens.
        as_query: score of the first token as query, for any key, (H,).
        as_key: score of the first token as key, for any other query, (H,).
    """
    is_key = (mask.key.position == 0)[:, None, None, :]
    is_query = (mask.query.position == 0)[:, None, :, None]
    scores = torch.where(is_key, as_key[:, None, None], scores)
    return torch.where(is_query, as_query[:, None, None], scores)
