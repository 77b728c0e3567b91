"""Tokens picked for groups, and put back: what attention in parts is made of.

A picked key is a copy for the group that reads it. So time and memory grow with the pairs that are computed;
no tensor is as large as all queries times all keys.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.arrangement import PADDING
from rlxf.attention.relation import Share


def as_rows(x: Tensor) -> Tensor:
    """x (B, H, T, D) -> (B T, H, D)."""
    return x.transpose(1, 2).flatten(0, 1)


def pick(rows: Tensor, slots: Tensor) -> Tensor:
    """Of rows (R, H, D) those that stand in slots (N, G), any for padding: (N, H, G, D)."""
    picked = F.embedding(slots.clamp(min=0), rows.flatten(1))
    return picked.unflatten(-1, rows.shape[1:]).transpose(1, 2)


def put_back(shares: Sequence[Share], parts: Sequence[Sequence[Tensor]], like: Tensor) -> Tensor:
    """What each query got, shaped as ``like`` (B, H, Tq, D); 0 where a query is in no group.

    Args:
        shares: which heads and which groups.
        parts: for each share, (N, heads, G, D) for each of its parts.
        like: the queries.
    """
    batch, _, length, size = like.shape
    if not any(parts):  # every slot is empty
        return torch.zeros_like(like)
    columns = [_column(share, some, batch * length) for share, some in zip(shares, parts, strict=True)]
    together = torch.cat(columns, dim=1) if len(columns) > 1 else columns[0]
    together = together.unflatten(0, (batch, length)).unflatten(-1, (-1, size)).transpose(1, 2)
    if len(shares) == 1:
        return together
    order = torch.arange(like.shape[1], device=like.device)
    return together[:, torch.cat([order[share.heads] for share in shares]).argsort()]


def _column(share: Share, parts: Sequence[Tensor], queries: int) -> Tensor:
    """(B Tq, heads D) of one share. Padding is written into a row that is then left out."""
    rows = torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1) for part in parts])
    slots = torch.cat([gathered.part.query.flatten() for gathered in share.parts])
    slots = torch.where(slots == PADDING, queries, slots)
    return rows.new_zeros(queries + 1, rows.shape[1]).index_copy(0, slots, rows)[:queries]
