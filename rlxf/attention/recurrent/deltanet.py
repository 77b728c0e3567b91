"""DeltaNet: linear attention whose state replaces the value of a key instead of adding to it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.recurrent.base import EpisodeRuns, MixerState, Recurrence, RecurrentMixer, zeros
from rlxf.attention.recurrent.decayed_attention import delta_rule
from rlxf.attention.recurrent.heads import ShortConvolution, rms_norm, split_heads, unit_norm
from rlxf.utils.checks import check_bool, check_int


@dataclass(frozen=True)
class DeltaNet(Recurrence):
    r"""``S_t = (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T``, ``y_t = q_t S_t / sqrt(K)``.

    Queries and keys pass a short convolution with SiLU and are divided by their Euclidean norm; values pass
    the convolution, too. ``beta_t = sigmoid(x_t W_b)``, or twice that with ``negative_eigenvalues``, with
    which the state can alternate between two values (Grazzi et al. 2025, arXiv:2411.12537). The outputs of
    each head are divided by their root mean square and projected.

    Source: Yang et al. 2024, arXiv:2406.06484, sections 2.2 and 3.3.

    Args:
        convolution: tokens of the short convolution, including the current one.
        negative_eigenvalues: whether beta ranges to 2 instead of 1.

    Raises:
        TypeError: if an option has the wrong type.
        ValueError: if convolution is less than 1.
    """

    paper: ClassVar[str] = "Yang et al. 2024, arXiv:2406.06484"
    convolution: int = 4
    negative_eigenvalues: bool = False

    def __post_init__(self) -> None:
        check_int("DeltaNet convolution", self.convolution)
        check_bool("DeltaNet negative_eigenvalues", self.negative_eigenvalues)

    @property
    def max_beta(self) -> float:
        """Upper limit of the step size."""
        return 2.0 if self.negative_eigenvalues else 1.0

    def build(self, width: int, heads: int) -> "DeltaRuleMixer":
        return DeltaRuleMixer(self, width, heads)


class DeltaRuleMixer(RecurrentMixer):
    """Mixer of `DeltaNet`."""

    def __init__(self, spec: DeltaNet, width: int, heads: int):
        super().__init__()
        self.spec = spec
        self.heads = heads
        self.size = width // heads
        self.qkv = orthogonal_linear(width, width, matrices=3, bias=False)
        self.convolution = ShortConvolution(3 * width, spec.convolution)
        self.beta = orthogonal_linear(width, heads, bias=False)
        self.output = orthogonal_linear(width, width, bias=False)

    def initial_state(self, batch: int) -> MixerState:
        state = zeros(self.qkv.weight, batch, self.heads, self.size, self.size)
        return {"state": state, "window": self.convolution.initial_window(batch)}

    def forward(self, x: Tensor, runs: EpisodeRuns, state: MixerState) -> tuple[Tensor, MixerState]:
        mixed, window = self.convolution(self.qkv(x), runs, state["window"])
        q, k, v = (split_heads(y, self.heads) for y in mixed.chunk(3, dim=-1))
        q, beta = unit_norm(q) * self.size**-0.5, self.spec.max_beta * self.beta(x).sigmoid()
        q = q.to(v.dtype)  # the dtype of the outputs
        y, last = delta_rule(q, unit_norm(k), v, beta, self.log_decay(x), runs, state["state"])
        return self.output(self.gate(x, rms_norm(y).flatten(-2))), {"state": last, "window": window}

    def log_decay(self, x: Tensor) -> Tensor:
        """Return the logarithm of the state's decay for tokens x (B, T, C): 0, (B, T, H)."""
        return torch.zeros(*x.shape[:2], self.heads, dtype=x.dtype, device=x.device)

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        """Apply the output gate of tokens x (B, T, C) to y (B, T, C); `DeltaNet` has none."""
        return y
