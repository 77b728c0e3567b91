"""What every residual technique offers, and the gates' common part."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.checks import check_finite_number
from rlxf.attention.technique import Technique


class Residual(Technique, ABC):
    """How the output y of a sublayer joins the stream x. Base of the residual techniques: frozen dataclasses.

    The stream is the tokens themselves, unless a technique says otherwise.
    """

    causal: ClassVar[str] = "token by token"
    cost: ClassVar[str] = "L"

    @abstractmethod
    def build(self, width: int, heads: int) -> nn.Module:
        """The module: ``forward(x, y)``, (..., C) and (..., C) -> (..., C)."""

    def opened(self, x: Tensor) -> Tensor:
        """Tokens (..., C) as the stream of the first layer."""
        return x

    def read(self, stream: Tensor) -> Tensor:
        """What attention reads of the stream, (..., C)."""
        return stream

    def closed(self, stream: Tensor) -> Tensor:
        """What comes of the stream behind the last layer, (..., C)."""
        return stream


@dataclass(frozen=True)
class Biased(Residual):
    """What the gates with a bias share: where their b starts.

    Args:
        bias: start of b, one learned number for each feature.

    Raises:
        TypeError: if bias is no number.
        ValueError: if it is not finite.
    """

    bias: float = 2.0

    def __post_init__(self) -> None:
        check_finite_number("bias", self.bias)

    def start(self, width: int) -> nn.Parameter:
        """b (C,) before training."""
        return nn.Parameter(torch.full((width,), float(self.bias)))


class Gate(nn.Module, ABC):
    """A gate of the Gated Transformer-XL: ``g(x, ReLU(y))``.

    The paper puts a ReLU behind each sublayer, before its gate.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.2 and equations 5 to 9.
    """

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Stream x (..., C) and sublayer output y (..., C) -> (..., C)."""
        return self.gate(x, y.relu())

    @abstractmethod
    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        """The paper's g(x, y)."""
