"""Search for the nearest keys among the far tokens of each query."""

from collections.abc import Callable
from itertools import product
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.with_faiss import as_faiss, faiss

Nearest = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""q (B, H, Tq, D), keys (B, H, F, D), mask (B, Tq, F), top -> int64 (B, H, Tq, min(top, F)): indices of the
visible keys with the largest dot products. Indices of masked keys fill up rows with fewer visible keys."""


def by_torch(q: Tensor, keys: Tensor, found: Tensor, top: int) -> Tensor:
    """Search with all dot products and ``torch.topk``. Arguments are those of `Nearest`."""
    scores = (q @ keys.transpose(-1, -2)).masked_fill(~found[:, None], -torch.inf)
    return scores.topk(min(top, keys.shape[2]), dim=-1).indices


def by_faiss(q: Tensor, keys: Tensor, found: Tensor, top: int) -> Tensor:
    """Search with a flat faiss index per row and head, on the CPU in float32, one query at a time.

    Arguments are those of `Nearest`.
    """
    count = min(top, keys.shape[2])
    if not count:
        return torch.empty(*q.shape[:3], 0, dtype=torch.long, device=q.device)
    masks = _bits(found)
    chosen = torch.empty(*q.shape[:3], count, dtype=torch.long)
    for row, head in product(*map(range, q.shape[:2])):
        index = faiss().IndexFlatIP(keys.shape[-1])
        index.add(as_faiss(keys[row, head]))
        for t, query in enumerate(as_faiss(q[row, head])[:, None]):
            params = faiss().SearchParameters(sel=faiss().IDSelectorBitmap(masks[row, t].numpy()))
            chosen[row, head, t] = torch.from_numpy(index.search(query, count, params=params)[1][0])
    chosen = chosen.to(q.device)
    # faiss returns -1 where it finds fewer than `count` keys; then at least one key is masked.
    masked = found.int().argmin(-1)[:, None, :, None]
    return torch.where(chosen < 0, masked, chosen)


def _bits(found: Tensor) -> Tensor:
    """Pack a mask (B, Tq, F) bool into bytes (B, Tq, ceil(F / 8)) uint8, lowest bit first."""
    bits = F.pad(found, (0, -found.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (bits << torch.arange(8, device=found.device)).sum(-1).to("cpu", torch.uint8)


Finder = Literal["torch", "faiss"]

NEAREST: dict[Finder, Nearest] = {"torch": by_torch, "faiss": by_faiss}
"""Search functions by the value of `KNN.index`."""
