"""minGRU: a gated recurrent unit whose gates do not depend on the state, so that it runs in parallel."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.recurrent.base import (
    DEFAULT_HORIZON,
    EpisodeRuns,
    MixerState,
    Recurrence,
    RecurrentMixer,
    time_constants,
    zeros,
)
from rlxf.attention.recurrent.scan import linear_scan
from rlxf.utils.checks import check_int


@dataclass(frozen=True)
class MinGRU(Recurrence):
    r"""``h_t = (1 - z_t) h_(t-1) + z_t x_t W_h``, with ``z_t = sigmoid(x_t W_z + b)``.

    The state h is projected to the output. The recurrence is computed as it stands, without the logarithms of
    the paper's appendix B, which need positive states.

    Source: Feng et al. 2024, arXiv:2410.01201, section 3.1.

    Args:
        horizon: largest of the time constants that b gives the features of the state, in tokens.

    Raises:
        TypeError: if horizon is not an int.
        ValueError: if horizon is less than 1.
    """

    paper: ClassVar[str] = "Feng et al. 2024, arXiv:2410.01201"
    horizon: int = DEFAULT_HORIZON

    def __post_init__(self) -> None:
        check_int("MinGRU horizon", self.horizon)

    def build(self, width: int, heads: int) -> "MinGRUMixer":
        return MinGRUMixer(self, width)


class MinGRUMixer(RecurrentMixer):
    """Mixer of `MinGRU`."""

    def __init__(self, spec: MinGRU, width: int):
        super().__init__()
        self.gate = orthogonal_linear(width, width)
        self.gate.bias.data.copy_(-time_constants(spec.horizon, width).log())
        self.candidate = orthogonal_linear(width, width, bias=False)
        self.output = orthogonal_linear(width, width, bias=False)

    def initial_state(self, batch: int) -> MixerState:
        return {"state": zeros(self.gate.weight, batch, self.gate.out_features)}

    def forward(self, x: Tensor, runs: EpisodeRuns, state: MixerState) -> tuple[Tensor, MixerState]:
        logit = self.gate(x).to(state["state"].dtype)  # in bfloat16, 1 - z would be 1 for a small z
        inputs = logit.sigmoid() * self.candidate(x)
        states = linear_scan(runs.decays((-logit).sigmoid()), runs.inputs(inputs), state["state"])
        return self.output(states.to(x.dtype)), {"state": states[:, -1]}
