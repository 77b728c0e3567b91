"""Passes through the layer stack of a transformer, for a segment and for one token at a time."""

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
    """Return a sequence that discards every appended item, for layer inputs that are not needed."""
    return deque(maxlen=0)


@dataclass(eq=False, kw_only=True)
class LayerPasses(ABC):
    """Common implementation of `Passes` for segments and for single steps.

    Args:
        embedding: position module that is shared by all passes.
        residual: technique that defines the residual stream.
        blocks: layer of each pass.
        index: (B, T), positions and episodes of the tokens.
        relations: self-attention mask of each pass.
        seen: projected context of a decoder; None without cross-attention.
        across: cross-attention mask; None without cross-attention.
        hidden: inputs of the passes so far, (B, T, C) each; `unasked` discards them.
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
        """Return the position signal that is added to the stream x before a pass; None for none."""
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
    """Passes of a segment.

    Args:
        recall: view of the memory before the segment.
        wanted: tokens whose outputs are needed; None for all. The last pass computes only these.
    """

    recall: Recall
    wanted: slice | None

    def run(self, number: int, x: Tensor) -> Tensor:
        """See `Passes`."""
        queries = self.wanted if number == self.count - 1 else None
        memory = self.recall.tokens(number, self.read(x))
        y = self.blocks[number].attend(x, memory, self.relations[number].asked_by(queries))
        return self._after_attention(number, y, self.across and self.across.asked_by(queries))

    def leave_out(self, number: int, x: Tensor) -> None:
        """Do nothing: the state already contains x."""

    def asking(self, x: Tensor) -> Tensor:
        """See `Passes`."""
        return x if self.wanted is None else x[:, self.wanted]


@dataclass(eq=False, kw_only=True)
class StepPasses(LayerPasses):
    """Passes of one token per row, which reads and updates a KV cache.

    Args:
        cache: KV cache, updated in place.
        slot: slot of the token in the cache.
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
        """Return x: the output of the token is always needed."""
        return x
