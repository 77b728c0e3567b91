"""Gather and scatter operations of block-sparse attention.

Each group of queries gets its own copy of the keys it reads. Time and memory grow with the number of computed
pairs; no tensor has the size of all queries times all keys.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.attention_mask import HeadGroup
from rlxf.attention.sparse.layout import PADDING


def flatten_tokens(x: Tensor) -> Tensor:
    """Flatten batch and time: x (B, H, T, D) -> (B T, H, D)."""
    return x.transpose(1, 2).flatten(0, 1)


def gather_tokens(rows: Tensor, slots: Tensor) -> Tensor:
    """Gather rows (R, H, D) at slots (N, G) -> (N, H, G, D); padding slots get an arbitrary row."""
    picked = F.embedding(slots.clamp(min=0), rows.flatten(1))
    return picked.unflatten(-1, rows.shape[1:]).transpose(1, 2)


def scatter_outputs(shares: Sequence[HeadGroup], parts: Sequence[Sequence[Tensor]], like: Tensor) -> Tensor:
    """Scatter the outputs of groups back to queries, (B, H, Tq, D); 0 for a query that is in no group.

    Args:
        shares: head groups with their block groups.
        parts: for each head group, outputs (N, heads, G, D) of each of its block groups.
        like: tensor with the shape of the result.
    """
    batch, _, length, size = like.shape
    if not any(parts):  # every slot is empty
        return torch.zeros_like(like)
    outputs = [_scatter(share, some, batch * length) for share, some in zip(shares, parts, strict=True)]
    merged = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
    merged = merged.unflatten(0, (batch, length)).unflatten(-1, (-1, size)).transpose(1, 2)
    if len(shares) == 1:
        return merged
    heads = torch.arange(like.shape[1], device=like.device)
    return merged[:, torch.cat([heads[share.heads] for share in shares]).argsort()]


def _scatter(share: HeadGroup, parts: Sequence[Tensor], queries: int) -> Tensor:
    """Scatter the outputs of one head group: (B Tq, heads D). Padding goes to an extra row, then dropped."""
    rows = torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1) for part in parts])
    slots = torch.cat([gathered.part.query.flatten() for gathered in share.parts])
    slots = torch.where(slots == PADDING, queries, slots)
    return rows.new_zeros(queries + 1, rows.shape[1]).index_copy(0, slots, rows)[:queries]
