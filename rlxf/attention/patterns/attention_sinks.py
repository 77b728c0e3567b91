"""Attention sinks: the first tokens of an episode stay visible in addition to a window of recent ones."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.patterns.base import Pattern, positions_near
from rlxf.utils.checks import MAX_INT, check_int


@dataclass(frozen=True)
class AttentionSinks(Pattern):
    """Query i attends to key j if ``|i - j| < size`` or ``j < sinks``.

    In a causal transformer a query attends to ``size`` recent tokens, including itself, and the first tokens
    of its episode. Softmax puts weight on the first tokens whatever they contain; with a plain `Window` they
    are no longer visible once the episode is longer than the window. Distances and positions are those in the
    episode.

    The pattern has no bound on the distance: an agent that acts with constant memory needs
    `StreamingXL`, which keeps the first tokens.

    Source: Xiao et al. 2023, arXiv:2309.17453, section 3.2 (StreamingLLM).

    Args:
        size: smallest distance, in tokens, at which keys are hidden unless they are among the first; at least
            1.
        sinks: number of first tokens that stay visible, at least 1.

    Raises:
        TypeError: if an option is not an integer.
        ValueError: if an option is less than 1.
    """

    paper: ClassVar[str] = "Xiao et al. 2023, arXiv:2309.17453"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L (size + sinks) pairs"
    size: int = 129
    sinks: int = 4

    def __post_init__(self) -> None:
        check_int("AttentionSinks size", self.size, most=MAX_INT + 1)
        check_int("AttentionSinks sinks", self.sinks)

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether ``|i - j| < size`` or ``j < sinks``."""
        return ((i - j).abs() < self.size) | (j < self.sinks)

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        first = positions[positions < self.sinks]
        near = positions_near(i, self.size - 1, positions)
        return torch.cat([first, near[near >= self.sinks]])
