"""Who finds the nearest of the tokens that a query may find."""

from collections.abc import Callable
from itertools import product
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.with_faiss import as_faiss, faiss

Nearest = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""q (B, H, Tq, D), keys (B, H, F, D), found (B, Tq, F), top -> int64 (B, H, Tq, top): the numbers of the keys
with the largest products, of those found; numbers of others where fewer are. No more than F."""


def by_torch(q: Tensor, keys: Tensor, found: Tensor, top: int) -> Tensor:
    """See `Nearest`: all products, then ``torch.topk``."""
    scores = (q @ keys.transpose(-1, -2)).masked_fill(~found[:, None], -torch.inf)
    return scores.topk(min(top, keys.shape[2]), dim=-1).indices


def by_faiss(q: Tensor, keys: Tensor, found: Tensor, top: int) -> Tensor:
    """See `Nearest`: a flat index for each row and head, on the CPU, in float32; a search for each query."""
    count = min(top, keys.shape[2])
    if not count:
        return torch.empty(*q.shape[:3], 0, dtype=torch.long, device=q.device)
    masks = _bits(found)
    chosen = torch.empty(*q.shape[:3], count, dtype=torch.long)
    for row, head in product(*map(range, q.shape[:2])):
        index = faiss().IndexFlatIP(keys.shape[-1])
        index.add(as_faiss(keys[row, head]))
        for t, query in enumerate(as_faiss(q[row, head])[:, None]):
            only = faiss().SearchParameters(sel=faiss().IDSelectorBitmap(masks[row, t].numpy()))
            chosen[row, head, t] = torch.from_numpy(index.search(query, count, params=only)[1][0])
    chosen = chosen.to(q.device)
    hidden = found.int().argmin(-1)[:, None, :, None]  # there is one, wherever fewer are found than asked for
    return torch.where(chosen < 0, hidden, chosen)


def _bits(found: Tensor) -> Tensor:
    """(B, Tq, F) bool -> (B, Tq, ceil(F / 8)) uint8, the lowest bit first."""
    bits = F.pad(found, (0, -found.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (bits << torch.arange(8, device=found.device)).sum(-1).to("cpu", torch.uint8)


Finder = Literal["torch", "faiss"]

NEAREST: dict[Finder, Nearest] = {"torch": by_torch, "faiss": by_faiss}
"""By the name that `KNN`'s ``index`` has."""
