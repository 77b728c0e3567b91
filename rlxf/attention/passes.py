"""The passes of tokens through the layers of a transformer: of a segment, and of one token that acts."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rlxf.attention.block import Block
from rlxf.attention.cache import Cache
from rlxf.attention.context import ProjectedContext
from rlxf.attention.index import EMPTY, Index
from rlxf.attention.memory.recall import Recall
from rlxf.attention.positions.base import Embedding
from rlxf.attention.relation import Relation
from rlxf.attention.residuals.base import Residual


def unasked() -> MutableSequence[Tensor]:
    """A list for what nobody asks for: it stays empty."""
    return deque(maxlen=0)


@dataclass(eq=False, kw_only=True)
class LayerPasses(ABC):
    """What a segment's passes and a step's have in common. See `Passes`.

    Args:
        embedding: the position's module for all passes.
        residual: what the stream is.
        blocks: the layer of each pass.
        index: (B, T), where the tokens stand.
        relations: what queries and keys are to one another, in each pass.
        seen: keys and values of a decoder's context in each pass; None without.
        across: what queries and context are to one another; None without.
        hidden: what each pass so far was entered with, (B, T, C); `unasked` keeps none of it.
    """

    embedding: Embedding
    residual: Residual
    blocks: Sequence[Block]
    index: Index
    relations: Sequence[Relation]
    seen: ProjectedContext | None
    across: Relation | None
    hidden: MutableSequence[Tensor] = field(default_factory=list)

    @property
    def count(self) -> int:
        """See `Passes`."""
        return len(self.blocks)

    @property
    def filled(self) -> Tensor:
        """See `Passes`."""
        return self.index.episode != EMPTY

    def through(self, x: Tensor) -> Tensor:
        """See `Passes`."""
        for number in range(self.count):
            x = self.run(number, self.enter(number, x))
        return x

    def enter(self, number: int, x: Tensor) -> Tensor:
        """See `Passes`."""
        signal = self.signal(number, x)
        x = x if signal is None else x + signal
        self.hidden.append(self.read(x))
        return x

    def signal(self, number: int, x: Tensor) -> Tensor | None:
        """What is added to the stream x before a pass."""
        signal = self.embedding.signal(self.read(x), self.index.position, number)
        return None if signal is None else self.residual.opened(signal)

    def read(self, x: Tensor) -> Tensor:
        """See `Passes`."""
        return self.residual.read(x)

    @abstractmethod
    def run(self, number: int, x: Tensor) -> Tensor:
        """See `Passes`."""

    @abstractmethod
    def leave_out(self, number: int, x: Tensor) -> None:
        """See `Passes`."""

    @abstractmethod
    def asking(self, x: Tensor) -> Tensor:
        """See `Passes`."""

    def _after_attention(self, number: int, x: Tensor, across: Relation | None) -> Tensor:
        block = self.blocks[number]
        if block.cross is not None and self.seen is not None and across is not None:
            x = block.cross(x, self.seen.layers[number], across)
        y: Tensor = block.think(x)
        return y


@dataclass(eq=False, kw_only=True)
class SegmentPasses(LayerPasses):
    """The passes of a segment.

    Args:
        recall: what is seen of the tokens before.
        wanted: the tokens whose outputs are wanted, None for all: the last pass works for those alone.
    """

    recall: Recall
    wanted: slice | None

    def run(self, number: int, x: Tensor) -> Tensor:
        """See `Passes`."""
        asking = self.wanted if number == self.count - 1 else None
        memory = self.recall.tokens(number, self.read(x))
        y = self.blocks[number].attend(x, memory, self.relations[number].asked_by(asking))
        return self._after_attention(number, y, self.across and self.across.asked_by(asking))

    def leave_out(self, number: int, x: Tensor) -> None:
        """See `Passes`: x is in the state, and that is all."""

    def asking(self, x: Tensor) -> Tensor:
        """See `Passes`."""
        return x if self.wanted is None else x[:, self.wanted]


@dataclass(eq=False, kw_only=True)
class StepPasses(LayerPasses):
    """The passes of one token, which reads a cache and writes into it.

    Args:
        cache: changed in place.
        slot: where the token goes.
    """

    cache: Cache
    slot: int

    def run(self, number: int, x: Tensor) -> Tensor:
        """See `Passes`."""
        self.cache.enter(number, self.read(x))
        y = self.blocks[number].step(x, self.cache.layers[number], self.slot, self.relations[number])
        return self._after_attention(number, y, self.across)

    def leave_out(self, number: int, x: Tensor) -> None:
        """See `Passes`."""
        self.cache.enter(number, self.read(x))
        self.blocks[number].write(x, self.cache.layers[number], self.slot, self.relations[number])

    def asking(self, x: Tensor) -> Tensor:
        """See `Passes`: the token asks."""
        return x
