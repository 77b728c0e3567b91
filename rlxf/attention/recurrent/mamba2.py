"""Mamba-2: a state space model with a scalar decay per head and token, in the form of linear attention."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.recurrent.base import (
    LARGEST_GAIN,
    LARGEST_LOG_GAIN,
    EpisodeRuns,
    MixerState,
    Recurrence,
    RecurrentMixer,
    zeros,
)
from rlxf.attention.recurrent.decayed_attention import decayed_attention
from rlxf.attention.recurrent.heads import ShortConvolution, split_heads
from rlxf.utils.checks import check_int

TIME_STEPS = (0.001, 0.1)
"""Range of the initial time steps of the paper's code."""


@dataclass(frozen=True)
class Mamba2(Recurrence):
    r"""``S_t = exp(-A dt_t) S_(t-1) + dt_t B_t x_t^T``, ``y_t = C_t S_t + D x_t``, per head.

    One projection gives z, x, B, C and dt. A short convolution with SiLU mixes x, B and C over time, and
    ``dt = softplus(dt + b)``. B and C are shared by all heads. The output is ``y silu(z)``, divided by its
    root mean square, scaled and projected. The width of x and z is twice the width of a token.

    Source: Dao and Gu 2024, arXiv:2405.21060, sections 6 and 7.

    Args:
        state: features N of a state per feature of x.
        convolution: tokens of the short convolution, including the current one.

    Raises:
        TypeError: if an option is not an int.
        ValueError: if an option is less than 1.
    """

    paper: ClassVar[str] = "Dao and Gu 2024, arXiv:2405.21060"
    state: int = 64
    convolution: int = 4

    def __post_init__(self) -> None:
        check_int("Mamba2 state", self.state)
        check_int("Mamba2 convolution", self.convolution)

    def build(self, width: int, heads: int) -> "Mamba2Mixer":
        return Mamba2Mixer(self, width, heads)


class Mamba2Mixer(RecurrentMixer):
    """Mixer of `Mamba2`."""

    limits: ClassVar = {"log_rate": LARGEST_LOG_GAIN, "time_step_bias": LARGEST_GAIN}

    def __init__(self, spec: Mamba2, width: int, heads: int):
        super().__init__()
        self.spec = spec
        self.heads = heads
        self.inner = 2 * width
        convolved = self.inner + 2 * spec.state
        self.input = orthogonal_linear(width, self.inner + convolved + heads, bias=False)
        self.convolution = ShortConvolution(convolved, spec.convolution)
        steps = torch.linspace(math.log(TIME_STEPS[0]), math.log(TIME_STEPS[1]), heads).exp()
        self.time_step_bias = nn.Parameter(steps.expm1().log())  # inverse of softplus
        self.log_rate = nn.Parameter(torch.linspace(1, 16, heads).log())
        self.skip = nn.Parameter(torch.ones(heads))
        self.norm = nn.RMSNorm(self.inner, eps=1e-5)
        self.output = orthogonal_linear(self.inner, width, bias=False)

    def initial_state(self, batch: int) -> MixerState:
        state = zeros(self.skip, batch, self.heads, self.spec.state, self.inner // self.heads)
        return {"state": state, "window": self.convolution.initial_window(batch)}

    def forward(self, x: Tensor, runs: EpisodeRuns, state: MixerState) -> tuple[Tensor, MixerState]:
        convolved = self.inner + 2 * self.spec.state
        gate, mixed, time_step = self.input(x).split([self.inner, convolved, self.heads], dim=-1)
        mixed, window = self.convolution(mixed, runs, state["window"])
        inner, *keys = mixed.split([self.inner, self.spec.state, self.spec.state], dim=-1)
        b, c = (key[:, :, None].expand(-1, -1, self.heads, -1) for key in keys)
        inner, time_step = split_heads(inner, self.heads), F.softplus(time_step + self.time_step_bias)
        log_decay = (-self.log_rate.exp() * time_step)[..., None]
        y, last = decayed_attention(c, b, inner * time_step[..., None], log_decay, runs, state["state"])
        y = (y + self.skip[:, None] * inner).flatten(-2)
        return self.output(self.norm(y * F.silu(gate))), {"state": last, "window": window}
