"""KV cache for acting one token at a time, and the context of a decoder."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from rlxf.attention.attention import PassCache
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.patterns.window import Full
from rlxf.attention.recurrent.base import RecurrentState
from rlxf.attention.relative import DistanceTables
from rlxf.attention.token_index import TokenIndex, write_slots


@dataclass(frozen=True, eq=False)
class Context:
    """Tokens that a decoder reads through cross-attention, usually the output of an encoder.

    A query attends to all context tokens of its own episode.

    Args:
        x: context tokens, (B, N, C).
        index: their positions and episodes, (B, N); episode -1 marks padding.
    """

    x: Tensor
    index: TokenIndex


@dataclass(frozen=True, eq=False)
class ProjectedContext:
    """Projected keys and values (B, H, N, D) of a context, one pair per pass."""

    layers: list[tuple[Tensor, ...]]
    index: TokenIndex

    def mask(self, query: TokenIndex) -> AttentionMask:
        """Return the mask of queries (B, T) over the context."""
        return AttentionMask(query, self.index, Full(), False, self.layers[0][0].dtype)

    def rows(self, rows: Tensor) -> "ProjectedContext":
        """Return the selected rows of the batch."""
        layers = [tuple(part[rows] for part in layer) for layer in self.layers]
        return ProjectedContext(layers, self.index.rows(rows))


class NoKeys:
    """Part of a `KVCache` for a recurrent layer, which has no keys."""

    layout = "no keys"

    def rows(self, rows: Tensor) -> "NoKeys":
        """Return this object."""
        return self

    def copy(self) -> "NoKeys":
        """Return this object."""
        return self


@dataclass(eq=False)
class KVCache:
    """KV cache of the last S tokens, in ring buffers: the cost of a step is constant over the episode.

    A recurrent kernel that attends to the whole episode keeps its recurrent state instead; S is then 1.
    `Transformer.step` updates the cache in place. Use `copy` to keep the earlier contents.

    Args:
        layers: for each pass, a ring buffer, or the state of a recurrent kernel; `NoKeys` for a pass through
            a layer with a recurrent mixer.
        index: (B, S), position and episode of the token in each slot.
        slot: slot of the next token in the ring buffer, after the `fixed_slots`.
        tables: distances for which position tables are computed, and the table that all layers share.
        context: projected context for cross-attention; None without it.
        recurrent: states of the recurrent layers; None without them.
    """

    layers: Sequence[PassCache | NoKeys]
    index: TokenIndex
    slot: int
    tables: DistanceTables
    context: ProjectedContext | None = field(default=None, kw_only=True)
    recurrent: RecurrentState | None = field(default=None, kw_only=True)

    @property
    def fixed_slots(self) -> int:
        """Number of slots before the ring buffer, for keys that are not overwritten in turn; by default 0."""
        return 0

    @property
    def layout(self) -> dict[str, object]:
        """Kind and size of each part by name. Caches of one core have the same layout for any batch."""
        layout: dict[str, object] = {"slots": self.index.shape[1]}
        layout |= {f"pass {number}": layer.layout for number, layer in enumerate(self.layers, start=1)}
        recurrent = {} if self.recurrent is None else self.recurrent.layout
        return layout | {f"recurrent state {name}": shape for name, shape in recurrent.items()}

    def of_attention(self, pass_index: int) -> PassCache:
        """Return the cache of a pass with attention."""
        layer = self.layers[pass_index]
        assert not isinstance(layer, NoKeys)
        return layer

    def write(self, index: TokenIndex) -> int:
        """Store the position and episode of the next token (B, 1) and return its slot."""
        first = self.fixed_slots
        slot = first + self.slot
        write_slots(self.index.position, 1, slot, index.position)
        write_slots(self.index.episode, 1, slot, index.episode)
        self.slot = (self.slot + 1) % (self.index.shape[1] - first)
        return slot

    def adapt_masks(self, masks: Sequence[AttentionMask]) -> Sequence[AttentionMask]:
        """Return the attention masks between a token and the slots in each pass; by default unchanged.

        Caches whose keys are not the tokens themselves override this method.

        Args:
            masks: masks of each pass, as derived from index and pattern.
        """
        return masks

    def observe_input(self, pass_index: int, x: Tensor) -> None:
        """Receive the input x (B, 1, C) of a pass, for caches that store it; by default do nothing.

        `write` has already stored the token's index.
        """

    def rows(self, rows: Tensor) -> Self:
        """Return a copy of the selected rows of the batch.

        Args:
            rows: bool (B,) mask or int64 (N,) row numbers, on any device.
        """
        rows = rows.nonzero()[:, 0] if rows.dtype is torch.bool else rows
        rows = rows.to(self.index.episode.device)
        layers = [layer.rows(rows) for layer in self.layers]
        context = None if self.context is None else self.context.rows(rows)
        recurrent = None if self.recurrent is None else self.recurrent.rows(rows)
        return replace(self, layers=layers, index=self.index.rows(rows), context=context, recurrent=recurrent)

    def copy(self) -> Self:
        """Return a copy of all rows."""
        return self.rows(torch.arange(self.index.shape[0], device=self.index.episode.device))
