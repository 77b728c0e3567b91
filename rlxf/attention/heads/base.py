"""What an output head offers: it reads neighbours beside the transformer's output."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from rlxf.attention.checks import check_finite_number, check_whole, check_word
from rlxf.attention.heads.datastore import Neighbours
from rlxf.attention.heads.search import SEARCHES


@dataclass(frozen=True)
class OutputHead(ABC):
    """What is common to all: how many neighbours, how sharply by distance, and who finds them.

    Args:
        k: neighbours.
        temperature: T.
        index: who finds them: "torch", or "faiss" with the extra knn. Both find the same.

    Raises:
        TypeError: if k is no whole number, or another one no number.
        ValueError: if k is less than 1, temperature not finite and above 0, or there is no such index.
    """

    paper: ClassVar[str]
    causal: ClassVar[str] = "token by token"
    cost: ClassVar[str] = "L N, N pairs stored"
    k: int = 32
    temperature: float = 1.0
    index: str = "torch"

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_whole(f"{name} k", self.k)
        check_finite_number(f"{name} temperature", self.temperature)
        if self.temperature <= 0:
            raise ValueError(f"{name} temperature must be above 0, got {self.temperature}")
        check_word(f"{name} index", self.index, tuple(SEARCHES))

    def weights(self, near: Neighbours) -> Tensor:
        """``exp(-d_i^2 / T)`` over their sum: how much each neighbour counts among them, (B, k)."""
        return (-near.squared / self.temperature).softmax(dim=1)

    @abstractmethod
    def build(self, width: int) -> "HeadReader":
        """The module that reads neighbours of outputs of that width."""


class HeadReader(nn.Module, ABC):
    """An output head at work."""

    @abstractmethod
    def share(self, h: Tensor) -> Tensor:
        """What neighbours count beside the model where values are numbers: h (B, C) -> (B,), 0 to 1."""

    @abstractmethod
    def log_prob(self, h: Tensor, near: Neighbours, weight: Tensor, bias: Tensor) -> Tensor:
        """``log p(v | h)`` of each of V values.

        Args:
            h: the transformer's outputs, (B, C).
            near: their neighbours, whose values are int64 (B, k), 0 to V - 1.
            weight: of the layer that gives the model's logits, (V, C).
            bias: of the same, (V,).

        Returns:
            (B, V).
        """
