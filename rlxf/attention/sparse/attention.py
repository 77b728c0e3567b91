"""Block-sparse attention: each group of queries attends to its own copy of its visible keys.

Time and memory grow with the number of computed pairs; no tensor has the size of all queries times all keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.base import AttentionKernel
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.positions.base import LayerPosition
from rlxf.attention.relative import DistinctDistances, distinct_distances
from rlxf.attention.sparse.plan import PADDING, BlockGroup
from rlxf.attention.token_index import EMPTY, TokenIndex

Heads = slice | list[int]


@dataclass(frozen=True, eq=False, kw_only=True)
class GatheredMask(AttentionMask):
    """Mask of N groups of queries (N, G) and their gathered keys (N, K); the groups are batch rows.

    Args:
        blocks: block group that the queries and keys come from.
    """

    blocks: BlockGroup

    @property
    def allowed_by_head(self) -> Tensor:
        """Boolean attention mask of the block group, (N, 1, G, K)."""
        return self.blocks.allowed[:, None]

    @property
    def aligned(self) -> bool:
        """Return False: gathered keys are not contiguous."""
        return False

    @cached_property
    def distances(self) -> Tensor:
        """Distinct distances of visible pairs, (R,) int64, descending."""
        return distinct_distances(self.distance[self.allowed])

    @cached_property
    def relative(self) -> DistinctDistances:
        """Distances of the gathered pairs."""
        _, queries, keys = self.blocks.allowed.shape
        shared = self.shared_table(self.distances)
        # `largest` is for aligned passes.
        return DistinctDistances(self.distances, shared, 0, queries, keys, self.distance)

    def average(
        self,
        kernel: AttentionKernel,
        position: LayerPosition,
        rows: Sequence[Tensor],
        size: int,
        heads: Heads,
    ) -> Tensor:
        """Compute the outputs of N groups of G queries in the given heads, (N, heads, G, V).

        Pairwise positions and kernels with weights need all heads. Otherwise only these heads are gathered.
        """
        kernel_heads = slice(None) if kernel.has_weights else heads
        scored_heads = position.required_heads(kernel_heads)
        q = gather_tokens(rows[0][:, scored_heads], self.blocks.query)
        k = gather_tokens(rows[1][:, scored_heads], self.blocks.key)
        v = gather_tokens(rows[2][:, kernel_heads], self.blocks.key)
        table = position.pass_table(self)
        q, bias = position.encode(q, k, size, self, table)
        if scored_heads != kernel_heads:
            q, k = q[:, kernel_heads], k[:, kernel_heads]
            bias = bias if bias is None else bias[:, kernel_heads]
        y = position.value_average(kernel, table)(q, k, v, bias, self)
        return self.zero_masked_rows(y[:, heads] if kernel_heads != heads else y)


def gather_masks(mask: AttentionMask) -> list[list[GatheredMask]]:
    """Return the masks of the block groups of each head group in the sparse plan of a mask."""
    return [
        [part for blocks in group.blocks for part in _gather(mask, group.pattern, blocks)]
        for group in mask.sparse_plan or ()
    ]


def _gather(mask: AttentionMask, pattern: Pattern, blocks: BlockGroup) -> list[GatheredMask]:
    """Return the mask of a block group, split where it has too many distinct distances for one table."""
    query, key = _gather_index(mask.query, blocks.query), _gather_index(mask.key, blocks.key)
    build = partial(
        GatheredMask, pattern=pattern, causal=mask.causal, dtype=mask.dtype, position=mask.position
    )
    gathered = build(query, key, blocks=blocks)
    count, queries = blocks.query.shape
    keys = blocks.key.shape[1]
    if mask.position is None or len(gathered.distances) <= 4 * keys:
        return [gathered]
    size = max(1, 2 * keys // queries)
    chunks = [slice(start, start + size) for start in range(0, count, size)]
    return [build(query.rows(c), key.rows(c), blocks=blocks.at(c)) for c in chunks]


def sparse_average(
    kernel: AttentionKernel, position: LayerPosition, qkv: Sequence[Tensor], size: int, mask: AttentionMask
) -> Tensor:
    """Compute the output of each head with gathered keys, (B, H, Tq, V); 0 for fully masked queries.

    Args:
        kernel: attention kernel.
        position: position encoding of the layer.
        qkv: queries (B, H, Tq, D + E) and keys (B, H, Tk, D + F) with extra kernel features, and values (B,
            H, Tk, V).
        size: D, features of a query without the extra ones.
        mask: attention mask with a sparse plan.
    """
    assert mask.sparse_plan is not None
    batch, heads, length, _ = qkv[0].shape
    masks = mask.once(gather_masks)
    head_sets = [group.heads for group in mask.sparse_plan]
    rows = [x.transpose(1, 2).flatten(0, 1) for x in qkv]  # (B T, H, D)
    numbers = torch.arange(heads, device=rows[0].device)
    outputs = []
    for parts, some in zip(masks, head_sets, strict=True):
        averages = [part.average(kernel, position, rows, size, some) for part in parts]
        blank = rows[2].new_zeros(batch * length + 1, len(numbers[some]) * rows[2].shape[2])
        outputs.append(scatter_tokens(parts, averages, blank))
    y = torch.cat(outputs, dim=1).unflatten(0, (batch, length)).unflatten(-1, (heads, -1)).transpose(1, 2)
    if len(head_sets) == 1:
        return y
    return y[:, torch.cat([numbers[some] for some in head_sets]).argsort()]


def gather_tokens(rows: Tensor, slots: Tensor) -> Tensor:
    """Gather rows (R, H, D) at slots (N, G) -> (N, H, G, D); padding slots get an arbitrary row."""
    picked = F.embedding(slots.clamp(min=0), rows.flatten(1))
    return picked.unflatten(-1, rows.shape[1:]).transpose(1, 2)


def scatter_tokens(masks: Sequence[GatheredMask], outputs: Sequence[Tensor], blank: Tensor) -> Tensor:
    """Scatter the outputs (N, heads, G, D) of block groups to the queries: (B Tq, heads D).

    Args:
        masks: masks of the block groups; there may be none.
        outputs: outputs of the block groups.
        blank: outputs of queries in no group, zeros (B Tq + 1, heads D). Padding goes to the last row, which
            is dropped.
    """
    if not masks:
        return blank[:-1]
    rows = torch.cat([output.transpose(1, 2).flatten(2).flatten(0, 1) for output in outputs])
    slots = torch.cat([mask.blocks.query.flatten() for mask in masks])
    slots = torch.where(slots == PADDING, len(blank) - 1, slots)
    return blank.to(rows.dtype).index_copy(0, slots, rows)[:-1]


def _gather_index(index: TokenIndex, slots: Tensor) -> TokenIndex:
    """Return the index of the tokens in flat slots (N, G). Padding is empty; other tokens get episode 0.

    A group belongs to one episode, so its number does not matter.
    """
    filled = slots != PADDING
    position = index.position.flatten()[slots.clamp(min=0)]
    return TokenIndex(position, torch.where(filled, 0, EMPTY))
