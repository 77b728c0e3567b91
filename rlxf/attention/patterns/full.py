"""Full attention: every token sees every token."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.patterns.base import Pattern


@dataclass(frozen=True)
class Full(Pattern):
    """Every key is visible: the cost grows with the square of the length.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.
    """

    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762"
    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L^2 pairs"

    shift_period = 1  # only distances count

    sees_all = True

    def within(self, window: Pattern) -> Pattern:
        return window

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return True for every pair."""
        return torch.ones((), dtype=torch.bool, device=i.device)

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        """Return all keys."""
        return positions
