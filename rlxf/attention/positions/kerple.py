"""KERPLE: a penalty on scores that is a learned kernel of the distance."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.positions.base import PairwiseLayerPosition, PairwisePosition
from rlxf.utils.checks import check_choice

Form = Literal["log", "power"]

MIN_INITIAL = 0.01
"""Smallest initial value of r_1 and r_2, as in the authors' code."""


@dataclass(frozen=True)
class KERPLE(PairwisePosition):
    r"""``s_ij -= r_1 log(1 + r_2 |i - j|)``, or ``s_ij -= r_1 |i - j|^r_2`` with the form "power".

    The penalty is added after the division by sqrt(D). Each head of each layer learns ``r_1 > 0`` and
    ``r_2 > 0``; with "power", ``r_2 < 2``. With ``r_2 = 1``, "power" is ALiBi with learned slopes. A softplus
    and a scaled sigmoid enforce the bounds. The authors' code clamps the parameters instead, which leaves
    parameters outside of the bounds without a gradient. The bidirectional form treats both directions alike.

    Source: Chi et al. 2022, arXiv:2205.09921, section 4.

    Args:
        form: "log" or "power"; the paper recommends "log".

    Raises:
        ValueError: if form is unknown.
    """

    paper: ClassVar[str] = "Chi et al. 2022, arXiv:2205.09921"
    form: Form = "log"

    def __post_init__(self) -> None:
        check_choice("KERPLE form", self.form, get_args(Form))

    def build(self, width: int, heads: int) -> "KERPLEBias":
        return FORMS[self.form](heads)


class KERPLEBias(PairwiseLayerPosition):
    """Module of `KERPLE` in one layer, with the form "log".

    ``first`` (H,) and ``second`` (H,) are r_1 and r_2 before the softplus. They start as in the authors'
    code: r_1 uniform in (0, 2), r_2 uniform in (0, 1).
    """

    def __init__(self, heads: int):
        super().__init__()
        self.first = nn.Parameter(inverse_softplus((2 * torch.rand(heads)).clamp(min=MIN_INITIAL)))
        self.second = nn.Parameter(inverse_softplus(torch.rand(heads).clamp(min=MIN_INITIAL)))

    def table(self, distances: Tensor, shared: Tensor | None) -> Tensor:
        """Return the bias (H, R) of distances (R,)."""
        r_1, r_2 = F.softplus(self.first)[:, None], F.softplus(self.second)[:, None]
        return -r_1 * (r_2 * distances.abs()).log1p()

    def bias(self, q: Tensor, k: Tensor, mask: AttentionMask, table: Tensor | None) -> Tensor:
        """Return the bias (1 or B, H, Tq, Tk)."""
        assert table is not None
        return mask.relative.lookup(table)


class KERPLEPowerBias(KERPLEBias):
    """Module of `KERPLE` in one layer, with the form "power".

    ``first`` (H,) is r_1 before the softplus, as for "log", and ``second`` (H,) is the logit of ``r_2 / 2``.
    They start as in the authors' code: r_1 uniform in (0, 1), r_2 uniform in (0, 2).
    """

    def __init__(self, heads: int):
        super().__init__(heads)
        self.first = nn.Parameter(inverse_softplus(torch.rand(heads).clamp(min=MIN_INITIAL)))
        self.second = nn.Parameter(torch.rand(heads).clamp(MIN_INITIAL / 2, 1 - MIN_INITIAL / 2).logit())

    def table(self, distances: Tensor, shared: Tensor | None) -> Tensor:
        r_1, r_2 = F.softplus(self.first)[:, None], 2 * self.second.sigmoid()[:, None]
        return -r_1 * distances.abs().to(r_2.dtype) ** r_2


FORMS: dict[Form, type[KERPLEBias]] = {"log": KERPLEBias, "power": KERPLEPowerBias}


def inverse_softplus(x: Tensor) -> Tensor:
    """Return y with ``softplus(y) = x``, for x > 0."""
    return x + (-torch.expm1(-x)).log()
