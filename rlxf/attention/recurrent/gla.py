"""Gated linear attention: the state decays at a rate per key channel that depends on the token."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.recurrent.base import EpisodeRuns, MixerState, Recurrence, RecurrentMixer, zeros
from rlxf.attention.recurrent.decayed_attention import decayed_attention
from rlxf.attention.recurrent.heads import rms_norm, split_heads
from rlxf.utils.checks import check_positive

DECAY_RANK = 16
"""Rank of the projection of a token to its decays, as in the paper."""


@dataclass(frozen=True)
class GLA(Recurrence):
    r"""``S_t = diag(a_t) S_(t-1) + k_t v_t^T``, ``y_t = q_t S_t / sqrt(K)``, with decays from the token.

    ``a_t = sigmoid(x_t W_1 W_2 + b)^(1 / temperature)``. The outputs of each head are divided by their root
    mean square, multiplied by ``silu(x_t W_r + b_r)`` and projected.

    Source: Yang et al. 2024, arXiv:2312.06635, sections 4.2 and 4.4.

    Args:
        temperature: reciprocal of the exponent of the decays; a larger value makes the memory longer.

    Raises:
        TypeError: if temperature is not a number.
        ValueError: if temperature is not above 0 or not finite.
    """

    paper: ClassVar[str] = "Yang et al. 2024, arXiv:2312.06635"
    temperature: float = 16.0

    def __post_init__(self) -> None:
        check_positive("GLA temperature", self.temperature)

    def build(self, width: int, heads: int) -> "GatedLinearAttention":
        return GatedLinearAttention(self, width, heads)


class GatedLinearAttention(RecurrentMixer):
    """Mixer of `GLA`."""

    def __init__(self, spec: GLA, width: int, heads: int):
        super().__init__()
        self.spec = spec
        self.heads = heads
        self.size = width // heads
        self.qkv = orthogonal_linear(width, width, matrices=3, bias=False)
        self.decay = nn.Sequential(nn.Linear(width, DECAY_RANK, bias=False), nn.Linear(DECAY_RANK, width))
        self.gate = orthogonal_linear(width, width)
        self.output = orthogonal_linear(width, width, bias=False)

    def initial_state(self, batch: int) -> MixerState:
        return {"state": zeros(self.qkv.weight, batch, self.heads, self.size, self.size)}

    def forward(self, x: Tensor, runs: EpisodeRuns, state: MixerState) -> tuple[Tensor, MixerState]:
        q, k, v = (split_heads(y, self.heads) for y in self.qkv(x).chunk(3, dim=-1))
        log_decay = split_heads(F.logsigmoid(self.decay(x)) / self.spec.temperature, self.heads)
        y, last = decayed_attention(q * self.size**-0.5, k, v, log_decay, runs, state["state"])
        return self.output(F.silu(self.gate(x)) * rms_norm(y).flatten(-2)), {"state": last}
