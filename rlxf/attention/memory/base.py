"""What every memory offers, and the value that it hands on."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from rlxf.attention.index import Index
from rlxf.attention.technique import Choices, Technique


@dataclass(frozen=True, eq=False)
class State:
    """What a transformer remembers: the inputs of each layer for the last M tokens.

    Args:
        hidden: (L, B, M, C), oldest first, without gradient.
        index: (B, M), where those tokens stand; episode -1 for an empty slot.
    """

    hidden: Tensor
    index: Index

    @classmethod
    def empty(cls, layers: int, batch: int, length: int, like: Tensor, width: int) -> "State":
        """No token yet; type and device of ``like``."""
        hidden = torch.zeros(layers, batch, length, width, dtype=like.dtype, device=like.device)
        return cls(hidden, Index.empty(batch, length, like.device))

    def rows(self, rows: Tensor) -> "State":
        """The chosen rows of the batch: ``rows`` is a bool (B,) or an int64 (N,) tensor."""
        return State(self.hidden[:, rows], self.index.rows(rows))


class Memory(Technique, ABC):
    """What a segment can see of the tokens before it. Base of the memory techniques: frozen dataclasses."""

    length: int
    """Tokens M that a state holds."""

    def check(self, choices: Choices) -> None:
        """Raise ValueError unless it goes with the other choices of a transformer."""
        if not choices.causal:
            raise ValueError(f"memory {self} needs causal=True: what is remembered cannot look ahead")

    @abstractmethod
    def __call__(self, state: State, hidden: Tensor, index: Index) -> State:
        """The state after a segment.

        Args:
            state: the state before it.
            hidden: (L, B, T, C), the inputs of each layer.
            index: (B, T), where the segment's tokens stand.
        """
