"""KV cache for acting one token at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlxf.attention.attention import LayerCache
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.cross_attention import ProjectedContext
from rlxf.attention.kernels.base import RecurrentKernelState
from rlxf.attention.relative import DistanceTables
from rlxf.attention.token_index import TokenIndex


@dataclass(eq=False)
class KVCache:
    """KV cache of the last S tokens, in ring buffers: the cost of a step is constant over the episode.

    A recurrent kernel that attends to the whole episode keeps its recurrent state instead; S is then 1.
    `Transformer.step` updates the cache in place. Use `copy` to keep the earlier contents.

    Args:
        layers: for each pass, a ring buffer, or the state of a recurrent kernel.
        index: (B, S), position and episode of the token in each slot.
        slot: slot of the next token.
        tables: distances for which position tables are computed, and the table that all layers share.
        context: projected context for cross-attention; None without it.
    """

    layers: Sequence[LayerCache | RecurrentKernelState]
    index: TokenIndex
    slot: int
    tables: DistanceTables
    context: ProjectedContext | None = field(default=None, kw_only=True)

    def write(self, index: TokenIndex) -> int:
        """Store the position and episode of the next token (B, 1) and return its slot."""
        slot = self.slot
        self.index.position[:, slot : slot + 1] = index.position
        self.index.episode[:, slot : slot + 1] = index.episode
        self.slot = (slot + 1) % self.index.shape[1]
        return slot

    def adapt_masks(self, masks: Sequence[AttentionMask]) -> Sequence[AttentionMask]:
        """Return the attention masks between a token and the slots in each pass; by default unchanged.

        Caches whose keys are not the tokens themselves override this method.

        Args:
            masks: masks of each pass, as derived from index and pattern.
        """
        return masks

    def observe_input(self, number: int, x: Tensor) -> None:
        """Receive the input x (B, 1, C) of a pass, for caches that store it; by default do nothing.

        `write` has already stored the token's index.
        """

    def rows(self, rows: Tensor) -> "KVCache":
        """Return a copy of the selected rows of the batch.

        Args:
            rows: bool (B,) mask or int64 (N,) row numbers.
        """
        rows = rows.nonzero()[:, 0] if rows.dtype is torch.bool else rows
        layers = [layer.rows(rows) for layer in self.layers]
        context = None if self.context is None else self.context.rows(rows)
        return KVCache(layers, self.index.rows(rows), self.slot, self.tables, context=context)

    def copy(self) -> "KVCache":
        """Return a copy of all rows."""
        return self.rows(torch.arange(self.index.shape[0], device=self.index.episode.device))
