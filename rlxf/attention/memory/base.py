"""Base class of memory techniques."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from rlxf.attention.index import Index
from rlxf.attention.memory.recall import Recall
from rlxf.attention.memory.state import State, joined
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.technique import Choices, Technique


class Memory(Technique, ABC):
    """Base of the memory techniques: frozen dataclasses that define what a segment sees of earlier tokens."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of tokens M in a state."""

    def check(self, choices: Choices) -> None:
        """Raise ValueError unless this memory is compatible with the other settings of a transformer."""
        if not choices.causal:
            raise ValueError(f"memory {self} needs causal=True: stored tokens cannot attend to future ones")

    @property
    def holds(self) -> int:
        """Maximum distance, in tokens, over all layers; the default is M."""
        return self.length

    def for_layer(self, number: int, layers: int) -> "Memory":
        """Return the memory of one layer, numbered from 0; by default all layers have the same."""
        return self

    def empty(self, layers: int, batch: int, like: Tensor, width: int) -> State:
        """Return an empty state with the dtype and device of ``like``."""
        return State.empty(layers, batch, self.length, like, width)

    def shows(self, pattern: Pattern) -> Pattern:
        """Return the pattern of tokens that are visible raw or compressed; by default ``pattern``."""
        return pattern

    def build(self, width: int) -> nn.Module | None:
        """Build the trainable module that a layer needs for this memory; None by default."""
        return None

    def recall(self, state: State | None, index: Index, layers: Sequence[Any]) -> Recall:
        """Create the view of a state for a segment.

        Args:
            state: memory state; None for no memory.
            index: (B, T), positions and episodes of the segment's tokens.
            layers: layer of each pass, a `Block`.
        """
        return Recall(state, index)

    def __call__(self, state: State, hidden: Tensor, index: Index) -> State:
        """Return the state after a segment: the last M tokens of old state and segment, without gradient.

        Args:
            state: state before the segment.
            hidden: (L, B, T, C), inputs of each layer.
            index: (B, T), positions and episodes of the segment's tokens.
        """
        new = State(hidden.detach(), index).last(self.length)
        return joined([state.last(self.length - new.index.shape[1]), new])
