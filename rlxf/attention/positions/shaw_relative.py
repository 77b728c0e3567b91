"""Shaw's relative positions: a learned vector for each distance, added to keys and values."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.base import AttentionKernel
from rlxf.attention.positions.base import AverageFn, PairwiseLayerPosition, PairwisePosition
from rlxf.utils.checks import check_int


@dataclass(frozen=True)
class ShawRelative(PairwisePosition):
    r"""``s_ij = q_i . (k_j + a^K_ij) / sqrt(D)``, ``z_i = sum_j w_ij (v_j + a^V_ij)``.

    ``a_ij = w[clip(j - i, -K, K)]``, learned in each layer, the same for all heads. Keys farther than K share
    the vector of distance K. A causal transformer uses one side of the tables.

    Source: Shaw et al. 2018, arXiv:1803.02155, sections 3.1 and 3.2. As there, no vector is computed for each
    pair: queries are multiplied by the 2 K + 1 vectors, and weights are summed by distance.

    Args:
        max_distance: largest distance K, in tokens, with separate vectors.

    Raises:
        TypeError: if max_distance is not an integer.
        ValueError: if max_distance is less than 1; in a spec, if the kernel does not compute each pair.
    """

    paper: ClassVar[str] = "Shaw et al. 2018, arXiv:1803.02155"
    max_distance: int = 16

    def __post_init__(self) -> None:
        check_int("ShawRelative max_distance", self.max_distance)

    @property
    def changes_values(self) -> bool:
        return True

    def build(self, width: int, heads: int) -> "ShawTables":
        return ShawTables(self, width // heads)


class ShawTables(PairwiseLayerPosition):
    """Module of `ShawRelative` in one layer: learned tables w^K and w^V (2 K + 1, D)."""

    def __init__(self, spec: ShawRelative, size: int):
        super().__init__()
        self.spec = spec
        self.key_table = nn.Parameter(torch.zeros(2 * spec.max_distance + 1, size))
        self.value_table = nn.Parameter(torch.zeros(2 * spec.max_distance + 1, size))

    def table(self, distances: Tensor, shared: Tensor | None) -> Tensor:
        """Return a^K / sqrt(D) and a^V, (2, R, D), for distances (R,).

        Row 0 of the learned tables is for keys K or more tokens before the query.
        """
        k = self.spec.max_distance
        row = k - distances.clamp(-k, k)
        return torch.stack([self.key_table[row] * self.key_table.shape[1] ** -0.5, self.value_table[row]])

    def bias(self, q: Tensor, k: Tensor, mask: AttentionMask, table: Tensor | None) -> Tensor:
        """Return ``q_i . a^K_ij / sqrt(D)`` (B, H, Tq, Tk) for q (B, H, Tq, D)."""
        assert table is not None
        return mask.relative.scores(q, table[0].T.expand(q.shape[1], -1, -1))

    def value_average(self, kernel: AttentionKernel, table: Tensor | None) -> AverageFn:
        """Return ``sum_j w_ij v_j + sum_r w_ir a^V_r``, with w_ir the sum of weights at distance r."""
        assert table is not None

        def average(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: AttentionMask) -> Tensor:
            weights = kernel.weights(q, k, bias, mask)
            by_distance = mask.relative.key_to_distance(mask.zero_masked_rows(weights))
            return weights @ v + by_distance @ table[1]

        return average
