"""DeBERTa's disentangled attention: content-to-content, content-to-position and position-to-content terms."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.positions.base import PairwiseLayerPosition, PairwisePosition, PositionEmbedding
from rlxf.utils.checks import check_choice, check_int

Form = Literal["code", "paper"]


@dataclass(frozen=True)
class Deberta(PairwisePosition):
    r"""``s_ij = (q_i . k_j + q_i . K^r[d(i, j)] + k_j . Q^r[d(i, j)]) / sqrt(3 D)``.

    ``d(i, j) = clip(i - j + k, 0, 2 k - 1)``; ``K^r = P W_kr`` and ``Q^r = P W_qr``, with 2 k learned vectors
    P for all layers and projections in each layer. The last term is that of the authors' code and of every
    published checkpoint; the paper's equation 4 has ``Q^r[d(j, i)]``: form "paper".

    Keys have a bias here, which DeBERTa's first version omits and the second has. The causal form is rlxf's
    variant: the vectors of later keys are unused, except by the last term of form "paper".

    Source: He et al. 2021, arXiv:2006.03654, section 3.1.

    Args:
        max_distance: distance k, in tokens, from which all keys share a vector.
        form: vector of the position-to-content term, as in the "code" or in the "paper".

    Raises:
        TypeError: if max_distance is not an integer.
        ValueError: if max_distance is less than 1, or form is unknown.
    """

    paper: ClassVar[str] = "He et al. 2021, arXiv:2006.03654"
    causal_form: ClassVar[str] = "rlxf's"
    max_distance: int = 128
    form: Form = "code"

    def __post_init__(self) -> None:
        check_int("Deberta max_distance", self.max_distance)
        check_choice("Deberta form", self.form, get_args(Form))

    def build_embedding(self, width: int, heads: int) -> "DebertaVectors":
        return DebertaVectors(self, width)

    def build(self, width: int, heads: int) -> "DebertaBias":
        return DebertaBias(self, width, heads)

    def row(self, distances: Tensor) -> Tensor:
        """Return the row of P for distances i - j."""
        return (distances + self.max_distance).clamp(0, 2 * self.max_distance - 1)


class DebertaVectors(PositionEmbedding):
    """Vectors P (2 k, C) of a `Deberta`, for all layers."""

    gather_cost = 2.0  # two terms by distance, which are shifted views where all pairs are computed

    def __init__(self, spec: Deberta, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * spec.max_distance, width) * 0.02)

    def table(self, distances: Tensor, causal: bool) -> Tensor:
        """Return P."""
        return self.weight


class DebertaBias(PairwiseLayerPosition):
    """Module of `Deberta` in one layer: W_kr (C, C), and W_qr (C, C) with its bias."""

    def __init__(self, spec: Deberta, width: int, heads: int):
        super().__init__()
        self.spec, self.heads = spec, heads
        self.key_projection = orthogonal_linear(width, width, bias=False)
        self.query_projection = orthogonal_linear(width, width)

    def query(self, q: Tensor, position: Tensor) -> Tensor:
        """Return ``q / sqrt(3)``, as the scale covers three terms."""
        return q * 3**-0.5

    def table(self, distances: Tensor, shared: Tensor | None) -> Tensor:
        """Return ``K^r / sqrt(3 D)`` and ``Q^r / sqrt(3 D)``, (2, H, D, R), for distances (R,) and P."""
        assert shared is not None
        query_distances = distances if self.spec.form == "code" else -distances
        keys = self.key_projection(shared)[self.spec.row(distances)]
        queries = self.query_projection(shared)[self.spec.row(query_distances)]
        tables = torch.stack([keys, queries]) * (3 * shared.shape[1] / self.heads) ** -0.5
        return tables.unflatten(-1, (self.heads, -1)).permute(0, 2, 3, 1)

    def bias(self, q: Tensor, k: Tensor, mask: AttentionMask, table: Tensor | None) -> Tensor:
        """Return the second and the third term (B, H, Tq, Tk), for q (B, H, Tq, D) and k (B, H, Tk, D)."""
        assert table is not None
        return mask.relative.scores(q, table[0]) + mask.relative.key_scores(k, table[1])
