"""Transformer-XL's relative positions: content and distance terms, each with a learned bias."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.positions.alibi import slopes
from rlxf.attention.positions.base import (
    PairwiseLayerPosition,
    PairwisePosition,
    SinusoidPosition,
    StepEncoder,
    frequencies,
)
from rlxf.utils.checks import check_finite_number


@dataclass(frozen=True)
class XLRelative(SinusoidPosition, PairwisePosition):
    r"""``s_ij = ((q_i + u) . k_j + (q_i + v) . (W_r r_{i-j})) / sqrt(D)``.

    ``r_t = [sin(t f), cos(t f)]`` with ``f_m = base^(-2m/C)``: sines first, as in the authors' code.
    The scale covers all four terms. Each layer learns its own u, v and W_r.

    Source: Dai et al. 2019, arXiv:1901.02860, section 3.3. ``recency_bias`` is rlxf's.

    Args:
        base: longest wavelength over 2 pi, in tokens; above 1.
        recency_bias: size of an initial preference for recent tokens, at least 0. Head h begins with distance
            scores of ``recency_bias exp(-slope_h |i - j|)`` for a query of 0, with the slopes of `ALiBi`, so
            distant tokens have bounded scores, and training can change the preference. They are approximated
            by C / 2 cosines: at width 64, scores of long distances differ by up to 0.4 times the bias, and
            widths below 32 are too small. 0, the default, is the paper's form: without a query, no distance
            is preferred.

    Raises:
        ValueError: if base is not above 1 or not finite, or recency_bias is negative or not finite; in a
            spec, if the width is odd.
    """

    paper: ClassVar[str] = "Dai et al. 2019, arXiv:1901.02860"
    base: float = 10000.0
    recency_bias: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite_number("XLRelative recency_bias", self.recency_bias)
        if self.recency_bias < 0:
            raise ValueError(f"XLRelative recency_bias must be at least 0, got {self.recency_bias}")

    def build(self, width: int, heads: int) -> "XLRelativeBias":
        return XLRelativeBias(self, width, heads)

    def encode(self, position: Tensor, width: int) -> Tensor:
        """Return r (R, width) of distances (R,), float64."""
        return torch.cat(self.waves(position, width), dim=-1)


class XLRelativeBias(PairwiseLayerPosition):
    """Module of `XLRelative` in one layer: W_r (C, C), u (H, D) and v (H, D)."""

    def __init__(self, spec: XLRelative, width: int, heads: int):
        super().__init__()
        self.spec = spec
        self.r = orthogonal_linear(width, width, bias=False)
        self.u = nn.Parameter(torch.zeros(heads, width // heads))
        self.v = nn.Parameter(torch.zeros(heads, width // heads))
        self.init_scores()

    @torch.no_grad()
    def init_scores(self) -> None:
        """Set the first row of W_r and the first element of v in each head to those of ``recency_bias``.

        ``slope / (slope^2 + f^2)`` is, up to a factor, the cosine transform of ``exp(-slope t)``, and another
        factor f is the spacing of frequencies in geometric progression.
        """
        if not self.spec.recency_bias:
            return
        heads, size = self.v.shape
        f, slope = frequencies(heads * size, self.spec.base), slopes(heads)[:, None]
        density = slope * f / (slope**2 + f**2)
        cosines = self.spec.recency_bias * density / density.sum(dim=1, keepdim=True)
        norm = cosines.norm(dim=1)
        rows = torch.cat([torch.zeros_like(cosines), cosines], dim=1) / norm[:, None]
        self.r.weight.unflatten(0, (heads, size))[:, 0] = rows.to(self.r.weight)
        self.v[:, 0] = norm.to(self.v) * size**0.5

    def query(self, q: Tensor, position: Tensor) -> Tensor:
        """Return q + u."""
        return q + self.u[:, None]

    def table(self, distances: Tensor, shared: Tensor | None) -> Tensor:
        """Return ``W_r r / sqrt(D)`` for distances (R,): (H, D, R)."""
        heads, size = self.u.shape
        r = self.r(self.spec.encode(distances, heads * size).to(self.u.dtype))
        return (r * size**-0.5).unflatten(-1, (heads, size)).permute(1, 2, 0)

    def bias(self, q: Tensor, k: Tensor, mask: AttentionMask, table: Tensor | None) -> Tensor:
        """Return ``(q_i + v) . (W_r r_{i-j}) / sqrt(D)`` (B, H, Tq, Tk) for q (B, H, Tq, D)."""
        assert table is not None
        return mask.relative.scores(q + self.v[:, None], table)

    def fused_step(self) -> StepEncoder:
        u, v = self.u, self.v

        def encode(q: Tensor, columns: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
            by_distance = torch.bmm((q + v).transpose(0, 1), table).transpose(0, 1)
            return q + u, by_distance.gather(-1, columns.expand(-1, q.shape[1], -1))

        return encode
