"""RetNet: linear attention whose state decays at a fixed rate per head."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.positions.base import rotate_pairs
from rlxf.attention.recurrent.base import EpisodeRuns, MixerState, Recurrence, RecurrentMixer, zeros
from rlxf.attention.recurrent.decayed_attention import decayed_attention
from rlxf.attention.recurrent.heads import rms_norm, split_heads
from rlxf.attention.technique import SpecView


@dataclass(frozen=True)
class RetNet(Recurrence):
    r"""``S_t = gamma_h S_(t-1) + k_t v_t^T``, ``y_t = q_t S_t / sqrt(K)``, with ``gamma_h = 1 - 2^(-5-h)``.

    Queries and keys are rotated by their position in the episode. The outputs of each head are divided by
    their root mean square, multiplied by ``silu(x W_g)`` and projected. Values have twice the features of
    keys, as in the paper.

    Source: Sun et al. 2023, arXiv:2307.08621, sections 2.1 and 2.2.
    """

    paper: ClassVar[str] = "Sun et al. 2023, arXiv:2307.08621"

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless heads have an even number of features, since pairs of them are rotated."""
        super().check(choices)
        if choices.width // choices.heads % 2:
            raise ValueError(
                f"RetNet rotates pairs of features and needs an even width per head, got width "
                f"{choices.width} and {choices.heads} heads; choose other numbers, or another recurrence, "
                f"e.g. GLA()"
            )

    def build(self, width: int, heads: int) -> "Retention":
        return Retention(width, heads, 2 * width)


class Retention(RecurrentMixer):
    """Multi-scale retention, the mixer of `RetNet`, with ``value_width`` value features over all heads."""

    def __init__(self, width: int, heads: int, value_width: int):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.qk = orthogonal_linear(width, width, matrices=2, bias=False)
        self.vg = orthogonal_linear(width, value_width, matrices=2, bias=False)
        self.output = orthogonal_linear(value_width, width, bias=False)

    def initial_state(self, batch: int) -> MixerState:
        values = self.output.in_features // self.heads
        return {"state": zeros(self.qk.weight, batch, self.heads, self.size, values)}

    def forward(self, x: Tensor, runs: EpisodeRuns, state: MixerState) -> tuple[Tensor, MixerState]:
        q, k = (rotate(split_heads(y, self.heads), runs.position) for y in self.qk(x).chunk(2, dim=-1))
        v, gate = self.vg(x).chunk(2, dim=-1)
        log_decay = log_decays(self.heads, x).expand(*x.shape[:2], -1)[..., None]
        v = split_heads(v, self.heads)
        y, last = decayed_attention(q, k * self.size**-0.5, v, log_decay, runs, state["state"])
        return self.output(F.silu(gate) * rms_norm(y).flatten(-2)), {"state": last}


def log_decays(heads: int, like: Tensor) -> Tensor:
    """Return ``log(1 - 2^(-5-h))`` for each head h, (H,), with dtype and device of ``like``."""
    return torch.log1p(-(2.0 ** (-5 - torch.arange(heads, dtype=like.dtype, device=like.device))))


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """Rotate adjacent pairs of features of x (B, T, H, K) by angles in proportion to the position (B, T).

    Angles per step are ``10000^-e`` with K / 2 exponents e from 0 to 1, both included; `RoPE` excludes 1.
    """
    exponent = torch.linspace(0, 1, x.shape[-1] // 2, dtype=torch.float64, device=x.device)
    return rotate_pairs(x, position[:, :, None, None] * 10000.0**-exponent)
