"""Base classes of output heads, which combine the transformer's output with retrieved neighbors."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from rlxf.attention.heads.datastore import SEARCHES, Neighbours
from rlxf.attention.validation import check_choice, check_finite_number, check_int


@dataclass(frozen=True)
class OutputHead(ABC):
    """Base of the output heads: frozen dataclasses with the options of the neighbor search.

    Args:
        k: number of neighbors.
        temperature: temperature T of the distance weights.
        index: search backend: "torch", or "faiss", which needs the extra ``knn``. Results are equal.

    Raises:
        TypeError: if k is not an int, or another number is not a number.
        ValueError: if k is less than 1, temperature is not positive and finite, or the index is unknown.
    """

    paper: ClassVar[str]
    causal: ClassVar[str] = "token by token"
    cost: ClassVar[str] = "L N, N pairs stored"
    k: int = 32
    temperature: float = 1.0
    index: str = "torch"

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_int(f"{name} k", self.k)
        check_finite_number(f"{name} temperature", self.temperature)
        if self.temperature <= 0:
            raise ValueError(f"{name} temperature must be above 0, got {self.temperature}")
        check_choice(f"{name} index", self.index, tuple(SEARCHES))

    def weights(self, near: Neighbours) -> Tensor:
        """Return the weights of the neighbors, ``exp(-d_i^2 / T)`` divided by their sum, (B, k)."""
        return (-near.squared / self.temperature).softmax(dim=1)

    @abstractmethod
    def build(self, width: int) -> "OutputHeadModule":
        """Build the module for transformer outputs of the given width."""


class OutputHeadModule(nn.Module, ABC):
    """Base of the modules that output heads build."""

    @abstractmethod
    def neighbour_weight(self, h: Tensor) -> Tensor:
        """Return the mixing weight of the neighbors for continuous values: h (B, C) -> (B,), from 0 to 1."""

    @abstractmethod
    def log_prob(self, h: Tensor, near: Neighbours, weight: Tensor, bias: Tensor) -> Tensor:
        """Return ``log p(v | h)`` of each of V discrete values.

        Args:
            h: outputs of the transformer, (B, C).
            near: their neighbors, with values int64 (B, k) from 0 to V - 1.
            weight: weight of the model's logit layer, (V, C).
            bias: bias of the model's logit layer, (V,).

        Returns:
            (B, V).
        """
