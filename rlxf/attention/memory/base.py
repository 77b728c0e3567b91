"""What every memory offers."""

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
    """What a segment can see of the tokens before it. Base of the memory techniques: frozen dataclasses."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens M that a state holds."""

    def check(self, choices: Choices) -> None:
        """Raise ValueError unless it goes with the other choices of a transformer."""
        if not choices.causal:
            raise ValueError(f"memory {self} needs causal=True: what is remembered cannot look ahead")

    @property
    def holds(self) -> int:
        """How many tokens back it reaches, in the layer that remembers most: by default M."""
        return self.length

    def for_layer(self, number: int, layers: int) -> "Memory":
        """The memory of layer 0, 1, ... of so many: by default the same in all."""
        return self

    def empty(self, layers: int, batch: int, like: Tensor, width: int) -> State:
        """A state that remembers nothing; type and device of ``like``."""
        return State.empty(layers, batch, self.length, like, width)

    def shows(self, pattern: Pattern) -> Pattern:
        """The tokens that a query sees in whatever form, of those that the pattern shows: by default all."""
        return pattern

    def build(self, width: int) -> nn.Module | None:
        """What a layer learns for it; by default nothing."""
        return None

    def recall(self, state: State | None, index: Index, layers: Sequence[Any]) -> Recall:
        """What the tokens of a pass see of a state.

        Args:
            state: what is remembered; None for nothing.
            index: (B, T), where the tokens stand.
            layers: the layer of each pass, a `Block`.
        """
        return Recall(state, index)

    def __call__(self, state: State, hidden: Tensor, index: Index) -> State:
        """The state after a segment: the last M of the tokens before and of its own, without gradient.

        Args:
            state: the state before it.
            hidden: (L, B, T, C), the inputs of each layer.
            index: (B, T), where the segment's tokens stand.
        """
        fresh = State(hidden.detach(), index).last(self.length)
        return joined([state.last(self.length - fresh.index.shape[1]), fresh])
