"""Gated DeltaNet: the delta rule on a state that also decays, at a rate that depends on the token."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.recurrent.base import (
    DEFAULT_HORIZON,
    LARGEST_GAIN,
    LARGEST_LOG_GAIN,
    time_constants,
)
from rlxf.attention.recurrent.deltanet import DeltaNet, DeltaRuleMixer
from rlxf.utils.checks import check_int


@dataclass(frozen=True)
class GatedDeltaNet(DeltaNet):
    r"""``S_t = a_t (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T``, ``y_t = q_t S_t / sqrt(K)``.

    ``a_t = exp(-A softplus(x_t W_a + b))`` per head. The outputs are multiplied by ``silu(x_t W_g)`` before
    the output projection. All else is as in `DeltaNet`.

    Source: Yang et al. 2025, arXiv:2412.06464, sections 3.1 and 3.4.

    b gives the heads time constants from 1 to ``horizon`` tokens.

    Args:
        convolution: tokens of the short convolution, including the current one.
        negative_eigenvalues: whether beta ranges to 2 instead of 1.
        horizon: largest of the initial time constants of the heads, in tokens.

    Raises:
        TypeError: if an option has the wrong type.
        ValueError: if convolution or horizon is less than 1.
    """

    paper: ClassVar[str] = "Yang et al. 2025, arXiv:2412.06464"
    horizon: int = DEFAULT_HORIZON

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("GatedDeltaNet horizon", self.horizon)

    def build(self, width: int, heads: int) -> "GatedDeltaRuleMixer":
        return GatedDeltaRuleMixer(self, width, heads)


class GatedDeltaRuleMixer(DeltaRuleMixer):
    """Mixer of `GatedDeltaNet`."""

    limits: ClassVar = {"log_rate": LARGEST_LOG_GAIN, "time_step.bias": LARGEST_GAIN}

    def __init__(self, spec: GatedDeltaNet, width: int, heads: int):
        super().__init__(spec, width, heads)
        self.time_step = orthogonal_linear(width, heads)
        self.log_rate = nn.Parameter(torch.zeros(heads))
        self.time_step.bias.data.copy_(time_constants(spec.horizon, heads).reciprocal().expm1().log())
        self.output_gate = orthogonal_linear(width, width, bias=False)

    def log_decay(self, x: Tensor) -> Tensor:
        return -self.log_rate.exp() * F.softplus(self.time_step(x))

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        return F.silu(self.output_gate(x)) * y
