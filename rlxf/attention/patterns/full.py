"""Full attention: every token sees every token."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.patterns.base import UNLIMITED


@dataclass(frozen=True)
class Full:
    """Every key is visible: cost grows with the square of the length.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.
    """

    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762"

    @property
    def reach(self) -> int:
        """No bound."""
        return UNLIMITED

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """True for every pair."""
        return torch.ones((), dtype=torch.bool, device=i.device)
