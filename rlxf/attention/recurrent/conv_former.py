"""Causal depthwise convolution as a token mixer: the mixer of Decision ConvFormer."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.recurrent.base import EpisodeRuns, MixerState, Recurrence, RecurrentMixer
from rlxf.attention.recurrent.scan import causal_windows
from rlxf.utils.checks import check_int


@dataclass(frozen=True)
class ConvFormer(Recurrence):
    r"""``y_t = b_m + sum_(i=0..W-1) w_(m, W-1-i) * x_(t-i)`` with elementwise products, m = t mod ``kinds``.

    The state is the window of the last W - 1 inputs of the episode, tokens of all kinds together; inputs
    before the episode are 0. Each kind of token has its own filter w and bias b. The kind is the position
    modulo ``kinds``. Decision Transformer's tokens are return, observation and action, so for it
    the paper uses ``kinds=3`` and a window of 6 tokens, which are two steps. With ``kinds=1`` all tokens
    share a filter, as for `GTrXLPPO`.

    Source: Kim et al. 2024, arXiv:2310.03022, section 4.

    Args:
        window: tokens W of a filter, including the current one.
        kinds: kinds of tokens, which alternate.

    Raises:
        TypeError: if an option is not an int.
        ValueError: if an option is less than 1.
    """

    paper: ClassVar[str] = "Kim et al. 2024, arXiv:2310.03022"
    cost: ClassVar[str] = "L window"
    window: int = 6
    kinds: int = 1

    def __post_init__(self) -> None:
        check_int("ConvFormer window", self.window)
        check_int("ConvFormer kinds", self.kinds)

    def build(self, width: int, heads: int) -> "ConvFormerMixer":
        return ConvFormerMixer(self, width)


class ConvFormerMixer(RecurrentMixer):
    """Mixer of `ConvFormer`: ``weight`` (kinds, C, W), with the current token's tap last, and ``bias``."""

    def __init__(self, spec: ConvFormer, width: int):
        super().__init__()
        self.spec = spec
        bound = spec.window**-0.5
        self.weight = nn.Parameter(torch.empty(spec.kinds, width, spec.window).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(spec.kinds, width))

    def initial_state(self, batch: int) -> MixerState:
        _, width, window = self.weight.shape
        return {"window": self.weight.new_zeros(batch, window - 1, width)}

    def forward(self, x: Tensor, runs: EpisodeRuns, state: MixerState) -> tuple[Tensor, MixerState]:
        inputs, window = causal_windows(x, runs, state["window"], self.spec.window)
        kind = runs.position % self.spec.kinds
        y = self.bias[kind]
        for tap, values in zip(self.weight.unbind(-1), inputs, strict=True):
            y = y + tap[kind] * values
        return y, {"window": window}
