"""Linear recurrent unit: a diagonal linear recurrence with complex eigenvalues."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.recurrent.base import (
    LARGEST_LOG_GAIN,
    EpisodeRuns,
    MixerState,
    Recurrence,
    RecurrentMixer,
    zeros,
)
from rlxf.attention.recurrent.scan import linear_scan
from rlxf.utils.checks import check_between

MAX_RADIUS = 1 - 2.0**-20
"""Largest initial absolute value of an eigenvalue: float32 resolves the logarithm of smaller ones."""


@dataclass(frozen=True)
class LRU(Recurrence):
    r"""``h_t = lambda h_(t-1) + gamma B x_t``, ``y_t = Re(C h_t) + D x_t``, with complex diagonal lambda.

    ``lambda = exp(-exp(nu) + i exp(theta))`` has an absolute value below 1. gamma is a parameter that is
    initialized to ``sqrt(1 - |lambda|^2)``.

    Source: Orvieto et al. 2023, arXiv:2303.06349, sections 3.3 and 3.4, appendix A.

    Args:
        min_radius: smallest initial absolute value of the eigenvalues.
        max_radius: largest one, at most 1 - 2^-20; values close to 1 make the initial memory long.
        max_phase: largest initial angle of the eigenvalues, in radians.

    Raises:
        TypeError: if an option is not a number.
        ValueError: if not 0 <= min_radius < max_radius <= 1 - 2^-20, or max_phase is not in (0, 2 pi].
    """

    paper: ClassVar[str] = "Orvieto et al. 2023, arXiv:2303.06349"
    min_radius: float = 0.9
    max_radius: float = 0.999
    max_phase: float = math.pi / 10

    def __post_init__(self) -> None:
        check_between("LRU max_radius", self.max_radius, 0, MAX_RADIUS, inclusive="right")
        check_between("LRU min_radius", self.min_radius, 0, self.max_radius, inclusive="left")
        check_between("LRU max_phase", self.max_phase, 0, 2 * math.pi, inclusive="right")

    def build(self, width: int, heads: int) -> "LRUMixer":
        return LRUMixer(self, width)


class LRUMixer(RecurrentMixer):
    """Mixer of `LRU`; complex matrices are stored as their real and imaginary parts, (2, C, C)."""

    limits = dict.fromkeys(("nu_log", "theta_log", "gamma_log"), LARGEST_LOG_GAIN)

    def __init__(self, spec: LRU, width: int):
        super().__init__()
        low, high = spec.min_radius**2, spec.max_radius**2
        radius = (torch.rand(width) * (high - low) + low).sqrt().clamp(min=1e-6)
        self.nu_log = nn.Parameter((-radius.log()).log())
        self.theta_log = nn.Parameter((torch.rand(width).clamp(min=1e-6) * spec.max_phase).log())
        self.gamma_log = nn.Parameter((1 - radius.square()).sqrt().log())
        self.b = nn.Parameter(torch.randn(2, width, width) / math.sqrt(2 * width))
        self.c = nn.Parameter(torch.randn(2, width, width) / math.sqrt(width))
        self.d = nn.Parameter(torch.randn(width))

    def initial_state(self, batch: int) -> MixerState:
        return {"state": zeros(self.b, batch, len(self.d), 2)}

    def forward(self, x: Tensor, runs: EpisodeRuns, state: MixerState) -> tuple[Tensor, MixerState]:
        wide = state["state"].dtype
        radius, angle = (-self.nu_log.to(wide).exp()).exp(), self.theta_log.to(wide).exp()
        decay = torch.polar(radius, angle).expand(*x.shape)
        b = torch.complex(*(self.b * self.gamma_log.exp()[:, None]).to(wide))
        inputs = runs.inputs(x.to(b.dtype) @ b.T)
        states = linear_scan(runs.decays(decay), inputs, torch.view_as_complex(state["state"].contiguous()))
        real, imaginary = self.c.to(wide)
        y = states.real @ real.T - states.imag @ imaginary.T
        return y.to(x.dtype) + self.d * x, {"state": torch.view_as_real(states[:, -1])}
