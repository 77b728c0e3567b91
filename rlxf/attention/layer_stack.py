"""Passes through the layer stack of a transformer, for a segment and for one token at a time."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from torch import Tensor

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.cache import KVCache
from rlxf.attention.cross_attention import ProjectedContext
from rlxf.attention.layer import Block
from rlxf.attention.memory.base import MemoryView
from rlxf.attention.positions.base import PositionEmbedding
from rlxf.attention.residuals.base import Residual
from rlxf.attention.token_index import EMPTY, TokenIndex


def discarded_inputs() -> MutableSequence[Tensor]:
    """Return a sequence that discards every appended item, for layer inputs that are not needed."""
    return deque(maxlen=0)


@dataclass(eq=False, kw_only=True)
class LayerStack(ABC):
    """Common implementation of `LayerPasses` for segments and for single steps.

    Args:
        embedding: position module that is shared by all passes.
        residual: technique that defines the residual stream.
        blocks: layer of each pass.
        index: (B, T), positions and episodes of the tokens.
        masks: self-attention mask of each pass.
        context: projected context of a decoder; None without cross-attention.
        hidden: inputs of the passes so far, (B, T, C) each; `discarded_inputs` discards them.
    """

    embedding: PositionEmbedding
    residual: Residual
    blocks: Sequence[Block]
    index: TokenIndex
    masks: Sequence[AttentionMask]
    context: ProjectedContext | None
    hidden: MutableSequence[Tensor] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.blocks)

    @cached_property
    def cross_mask(self) -> AttentionMask | None:
        """Cross-attention mask; None without cross-attention."""
        return None if self.context is None else self.context.mask(self.index)

    @property
    def filled(self) -> Tensor:
        return self.index.episode != EMPTY

    @property
    def run_all(self) -> Callable[[Tensor], Tensor]:
        """See `LayerPasses`; the residual technique runs the passes."""
        return partial(self.residual.run_passes, self)

    def start_pass(self, number: int, x: Tensor) -> Tensor:
        signal = self.signal(number, x)
        x = x if signal is None else x + signal
        self.hidden.append(self.attention_input(x))
        return x

    def signal(self, number: int, x: Tensor) -> Tensor | None:
        """Return the position signal that is added to the stream x before a pass; None for none."""
        signal = self.embedding.signal(self.attention_input(x), self.index.position, number)
        return None if signal is None else self.residual.init_stream(signal)

    def attention_input(self, x: Tensor) -> Tensor:
        return self.residual.attention_input(x)

    @abstractmethod
    def run(self, number: int, x: Tensor) -> Tensor:
        """See `LayerPasses`."""

    @abstractmethod
    def skip(self, number: int, x: Tensor) -> None:
        """See `LayerPasses`."""

    @abstractmethod
    def select_outputs(self, x: Tensor) -> Tensor:
        """See `LayerPasses`."""

    def _after_attention(self, number: int, x: Tensor, across: AttentionMask | None) -> Tensor:
        block = self.blocks[number]
        if block.cross is not None and self.context is not None and across is not None:
            x = block.cross(x, self.context.layers[number], across)
        y: Tensor = block.feed(x)
        return y


@dataclass(eq=False, kw_only=True)
class SegmentStack(LayerStack):
    """Passes of a segment.

    Args:
        view: view of the memory before the segment.
        output_slice: tokens whose outputs are needed; None for all. The last pass computes only these.
    """

    view: MemoryView
    output_slice: slice | None

    def run(self, number: int, x: Tensor) -> Tensor:
        queries = self.output_slice if number == self.count - 1 else None
        memory = self.view.tokens(number, self.attention_input(x))
        y = self.blocks[number].attend(x, memory, self.masks[number].select_queries(queries))
        return self._after_attention(number, y, self.cross_mask and self.cross_mask.select_queries(queries))

    def skip(self, number: int, x: Tensor) -> None:
        """Do nothing: the state already contains x."""

    def select_outputs(self, x: Tensor) -> Tensor:
        return x if self.output_slice is None else x[:, self.output_slice]


@dataclass(eq=False, kw_only=True)
class StepStack(LayerStack):
    """Passes of one token per row, which reads and updates a KV cache.

    Args:
        cache: KV cache, updated in place.
        slot: slot of the token in the cache.
    """

    cache: KVCache
    slot: int

    def run(self, number: int, x: Tensor) -> Tensor:
        self.cache.observe_input(number, self.attention_input(x))
        block, cache = self.blocks[number], self.cache.layers[number]
        h = block.attention_norm.branch_input(x)
        y = block.attention.step(h, cache, self.slot, self.masks[number])
        x = block.attention_norm.combine(x, block.dropout(y))
        return self._after_attention(number, x, self.cross_mask)

    def skip(self, number: int, x: Tensor) -> None:
        self.cache.observe_input(number, self.attention_input(x))
        self.blocks[number].write(x, self.cache.layers[number], self.slot, self.masks[number])

    def select_outputs(self, x: Tensor) -> Tensor:
        """Return x: the output of the token is always needed."""
        return x
