"""Exact search for the nearest keys, and the mask of distant tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.faiss_support import import_faiss, to_faiss_array
from rlxf.attention.token_index import EMPTY, TokenIndex

if TYPE_CHECKING:
    from rlxf.attention.memory.knn import KNN


@dataclass(frozen=True, eq=False, kw_only=True)
class KNNMask(AttentionMask):
    """`AttentionMask` with an additional mask over far tokens.

    Args:
        memory: memory technique, which defines the far tokens.
        far: index of the candidate far tokens, (B, F).
        slot: slot of the current token among them, for acting.
    """

    memory: "KNN"
    far: TokenIndex
    slot: int = 0

    @classmethod
    def extend(
        cls, relations: Sequence[AttentionMask], number: int, memory: "KNN", far: TokenIndex, slot: int = 0
    ) -> list[AttentionMask]:
        """Return the relations of all passes, with the far tokens added in pass ``number``."""
        local = {field.name: getattr(relations[number], field.name) for field in fields(AttentionMask)}
        extended = cls(**local, memory=memory, far=far, slot=slot)
        return [*relations[:number], extended, *relations[number + 1 :]]

    def far_mask(self, queries: slice = slice(None)) -> Tensor:
        """Return the mask over far tokens, (B, Tq, F) bool, for the selected queries."""
        query = self.query.at(queries)
        i, j = query.position[:, :, None], self.far.position[:, None, :]
        same = query.episode[:, :, None] == self.far.episode[:, None, :]
        return same & (self.far.episode != EMPTY)[:, None, :] & self.memory.sees_far(i, j)


SearchFn = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""q (B, H, Tq, D), keys (B, H, F, D), mask (B, Tq, F), top -> int64 (B, H, Tq, min(top, F)): indices of the
visible keys with the largest dot products. Indices of masked keys fill up rows with fewer visible keys."""


def search_torch(q: Tensor, keys: Tensor, found: Tensor, top: int) -> Tensor:
    """Search with all dot products and ``torch.topk``. Arguments are those of `SearchFn`."""
    scores = (q @ keys.transpose(-1, -2)).masked_fill(~found[:, None], -torch.inf)
    return scores.topk(min(top, keys.shape[2]), dim=-1).indices


def search_faiss(q: Tensor, keys: Tensor, found: Tensor, top: int) -> Tensor:
    """Search with a flat faiss index per row and head, on the CPU in float32, one query at a time.

    Arguments are those of `SearchFn`.
    """
    count = min(top, keys.shape[2])
    if not count:
        return torch.empty(*q.shape[:3], 0, dtype=torch.long, device=q.device)
    masks = _bits(found)
    chosen = torch.empty(*q.shape[:3], count, dtype=torch.long)
    for row, head in product(*map(range, q.shape[:2])):
        index = import_faiss().IndexFlatIP(keys.shape[-1])
        index.add(to_faiss_array(keys[row, head]))
        for t, query in enumerate(to_faiss_array(q[row, head])[:, None]):
            params = import_faiss().SearchParameters(
                sel=import_faiss().IDSelectorBitmap(masks[row, t].numpy())
            )
            chosen[row, head, t] = torch.from_numpy(index.search(query, count, params=params)[1][0])
    chosen = chosen.to(q.device)
    # faiss returns -1 where it finds fewer than `count` keys; then at least one key is masked.
    masked = found.int().argmin(-1)[:, None, :, None]
    return torch.where(chosen < 0, masked, chosen)


def _bits(found: Tensor) -> Tensor:
    """Pack a mask (B, Tq, F) bool into bytes (B, Tq, ceil(F / 8)) uint8, lowest bit first."""
    bits = F.pad(found, (0, -found.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (bits << torch.arange(8, device=found.device)).sum(-1).to("cpu", torch.uint8)


SearchBackend = Literal["torch", "faiss"]

SEARCH_FUNCTIONS: dict[SearchBackend, SearchFn] = {"torch": search_torch, "faiss": search_faiss}
"""Search functions by the value of `KNN.index`."""
