"""kNN-augmented attention over a large memory of distant tokens, as in Memorizing Transformers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.attention import Attention, LayerCache, PassCache, Projected
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.attention_options import AttentionArguments, repeat_heads
from rlxf.attention.dropout import dropout as apply_dropout
from rlxf.attention.memory.base import extend_mask
from rlxf.attention.token_index import TokenIndex, gather_slots
from rlxf.utils.extras import check_search_backend, import_faiss

MAX_SCORES = 2**24
"""Maximum number of scores in memory at a time during the search: 64 MB in float32."""

MIN_SPARSITY = 4
"""Candidate tokens are compacted before the search if fewer than 1 / MIN_SPARSITY of them are visible to any
query of the batch."""

INITIAL_SCALE = 20.0
"""Initial value of exp(s), as in public implementations. Unscaled cosine scores are too uniform."""


@dataclass(frozen=True, eq=False)
class FarLayerCache(LayerCache):
    """`LayerCache` with an additional buffer for far tokens.

    Args:
        far: buffer of F slots; keys have unit length and no position encoding.
    """

    far: LayerCache

    def rows(self, rows: Tensor) -> Self:
        return replace(super().rows(rows), far=self.far.rows(rows))

    def compact(self, kept: slice) -> Self:
        """Return a cache with the kept far tokens at the start of a new buffer of the same size."""
        far = LayerCache(torch.zeros_like(self.far.keys), torch.zeros_like(self.far.values), None)
        far.write(0, self.far.keys[:, :, kept], self.far.values[:, :, kept])
        return replace(self, far=far)


VisibilityFn = Callable[[Tensor, Tensor], Tensor]
"""Maps positions of queries and keys, which broadcast, to whether the query may attend to the key, bool."""


@dataclass(frozen=True, eq=False, kw_only=True)
class KNNMask(AttentionMask):
    """`AttentionMask` with an additional mask over far tokens.

    Args:
        is_far: rule (i, j) -> bool on positions: whether a query attends to a key as a far token.
        far: index of the candidate far tokens, (B, F).
        slot: slot of the current token among them, for acting.
    """

    is_far: VisibilityFn
    far: TokenIndex
    slot: int = 0

    @classmethod
    def extend(
        cls,
        masks: Sequence[AttentionMask],
        knn_pass: int,
        is_far: VisibilityFn,
        far: TokenIndex,
        slot: int = 0,
    ) -> list[AttentionMask]:
        """Return the masks of all passes, with the far tokens added in pass ``knn_pass``, from 0."""
        extended = extend_mask(cls, masks[knn_pass], is_far=is_far, far=far, slot=slot)
        return [*masks[:knn_pass], extended, *masks[knn_pass + 1 :]]

    def far_mask(self, queries: slice = slice(None)) -> Tensor:
        """Return the mask over far tokens, (B, Tq, F) bool, for the selected queries."""
        query = self.query.at(queries)
        i, j = query.position[:, :, None], self.far.position[:, None, :]
        return query.shares_episode(self.far) & self.is_far(i, j)


SearchFn = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""q (B, H, Tq, D), keys (B, H, F, D), mask (B, Tq, F), top -> int64 (B, H, Tq, min(top, F)): indices of the
visible keys with the largest dot products. Indices of masked keys fill up rows with fewer visible keys."""


def search_torch(q: Tensor, keys: Tensor, mask: Tensor, top: int) -> Tensor:
    """Search with all dot products and ``torch.topk``. Arguments are those of `SearchFn`."""
    scores = (q @ keys.transpose(-1, -2)).masked_fill(~mask[:, None], -torch.inf)
    return scores.topk(min(top, keys.shape[2]), dim=-1).indices


def search_faiss(q: Tensor, keys: Tensor, mask: Tensor, top: int) -> Tensor:
    """Search with a flat faiss index per row and head, on the CPU in float32, one query at a time.

    Arguments are those of `SearchFn`.
    """
    count = min(top, keys.shape[2])
    if not count:
        return torch.empty(*q.shape[:3], 0, dtype=torch.long, device=q.device)
    masks = _bits(mask)
    chosen = torch.empty(*q.shape[:3], count, dtype=torch.long)
    for row, head in product(*map(range, q.shape[:2])):
        index = import_faiss().IndexFlatIP(keys.shape[-1])
        index.add(keys[row, head].float().contiguous().numpy(force=True))
        for t, query in enumerate(q[row, head].float().contiguous().numpy(force=True)[:, None]):
            params = import_faiss().SearchParameters(
                sel=import_faiss().IDSelectorBitmap(masks[row, t].numpy())
            )
            chosen[row, head, t] = torch.from_numpy(index.search(query, count, params=params)[1][0])
    chosen = chosen.to(q.device)
    # faiss returns -1 where it finds fewer than `count` keys; then at least one key is masked.
    masked = mask.int().argmin(-1)[:, None, :, None]
    return torch.where(chosen < 0, masked, chosen)


def _bits(mask: Tensor) -> Tensor:
    """Pack a mask (B, Tq, F) bool into bytes (B, Tq, ceil(F / 8)) uint8, lowest bit first."""
    bits = F.pad(mask, (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (bits << torch.arange(8, device=mask.device)).sum(-1).to("cpu", torch.uint8)


SearchBackend = Literal["torch", "faiss"]

SEARCH_FUNCTIONS: dict[SearchBackend, SearchFn] = {"torch": search_torch, "faiss": search_faiss}
"""Search functions by the value of `KNN.index`."""


class KNNAttention(Attention):
    """Attention layer that retrieves far tokens from a `KNN` memory.

    Parameter ``log_scale`` (H,) is s and ``gate`` (H,) is w in the formulas of `KNN`.
    """

    def __init__(self, arguments: AttentionArguments, top: int, index: SearchBackend = "torch"):
        super().__init__(arguments)
        check_search_backend(index)
        self.top = top
        self.nearest = SEARCH_FUNCTIONS[index]
        self.log_scale = nn.Parameter(torch.full((self.heads,), math.log(INITIAL_SCALE)))
        self.gate = nn.Parameter(torch.zeros(self.heads))

    def forward(self, x: Tensor, memory: Projected | None, mask: AttentionMask) -> Tensor:
        """Attend over far and local tokens. The first keys and values of memory belong to far tokens."""
        far, near = self._split_memory(memory, mask)
        q, k, v = self.project_qkv(x, near, mask)
        y = self._add_far(q, self.segment_average(q, k, v, mask), far, mask)
        return self._merge_heads(y, mask.queries(x), mask)

    def weights(self, x: Tensor, memory: Projected | None, mask: AttentionMask) -> Tensor:
        """Return the attention weights over far and local tokens, (B, H, T, F + M + T)."""
        (k, _), near = self._split_memory(memory, mask)
        of_near = super().weights(x, near, mask)
        assert isinstance(mask, KNNMask)
        q = self.project_queries(mask.queries(x))
        chosen, weight, g = self._nearest(q, repeat_heads(k, self.heads), mask.far_mask())
        of_far = q.new_zeros(*q.shape[:3], k.shape[2]).scatter(-1, chosen, weight)
        return torch.cat([g * of_far, (1 - g) * of_near], dim=-1)

    def step(self, x: Tensor, cache: PassCache, slot: int, mask: AttentionMask) -> Tensor:
        assert isinstance(cache, FarLayerCache)
        q, projected = self._project_jointly(x)
        self._write(projected, cache, slot, mask)
        near = self.average(q, cache.keys, cache.values, mask, cache.table)
        return self._merge_heads(self._add_far(q, near, (cache.far.keys, cache.far.values), mask), x, mask)

    def write(self, x: Tensor, cache: PassCache, slot: int, mask: AttentionMask) -> None:
        assert isinstance(cache, FarLayerCache)
        self._write(self.project(x), cache, slot, mask)

    def _write(self, projected: Projected, cache: FarLayerCache, slot: int, mask: AttentionMask) -> None:
        assert isinstance(mask, KNNMask)
        cache.write(slot, *self.prepare_keys(projected, mask.query.position))
        cache.far.write(mask.slot, *self.far(projected))

    def far(self, projected: Projected) -> tuple[Tensor, Tensor]:
        """Return keys and values for the kNN search, without position encoding and gradient."""
        return self.as_key(projected[0]).detach(), projected[1].detach()

    def as_key(self, k: Tensor) -> Tensor:
        """Normalize keys to length 1."""
        return F.normalize(k, dim=-1)

    def _with_query_extras(self, q: Tensor, x: Tensor) -> Tensor:
        """Scale queries so that ``q . k / sqrt(D)`` is the scaled cosine similarity."""
        scale = self.log_scale.exp()[:, None, None] * self.size**0.5
        return super()._with_query_extras(F.normalize(q, dim=-1) * scale, x)

    def _split_memory(
        self, memory: Projected | None, mask: AttentionMask
    ) -> tuple[tuple[Tensor, Tensor], Projected]:
        """Split keys and values of memory into those of far and of local tokens."""
        assert memory is not None
        assert isinstance(mask, KNNMask)
        count = mask.far.shape[1]
        far = tuple(part[:, :, :count] for part in memory)
        return self.far(far), tuple(part[:, :, count:] for part in memory)

    def _add_far(self, q: Tensor, near: Tensor, far: tuple[Tensor, Tensor], mask: AttentionMask) -> Tensor:
        """Compute ``g o_far + (1 - g) o_near``: near (B, H, Tq, D), far keys and values (B, K, F, D).

        Queries are processed in chunks, because the scores of all queries against thousands of keys may
        not fit into memory.
        """
        assert isinstance(mask, KNNMask)
        if not far[0].shape[2]:
            return near
        size = max(1, MAX_SCORES * self.kv_heads // (self.heads * far[0][..., 0].numel()))
        chunks = (slice(start, start + size) for start in range(0, q.shape[2], size))
        mixed = [self._mix(q[:, :, c], near[:, :, c], far, mask.far_mask(c)) for c in chunks]
        return torch.cat(mixed, dim=2)

    def _mix(self, q: Tensor, near: Tensor, far: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        """Compute the mixture for all queries at once, given their mask over far tokens (B, Tq, F)."""
        columns = mask.flatten(0, 1).any(0).nonzero()[:, 0]
        if MIN_SPARSITY * len(columns) < mask.shape[-1]:
            far, mask = tuple(part[:, :, columns] for part in far), mask[..., columns]
        keys, values = self.repeat_keys(*far)
        chosen, weight, g = self._nearest(q, keys, mask)
        o = (weight[..., None] * gather_slots(values, chosen)).sum(-2)
        return g * o + (1 - g) * near

    def _nearest(self, q: Tensor, keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return indices of the k best keys, their softmax weights (0 where masked) and the gate.

        Indices and weights are (B, H, Tq, k). The gate is (B, H, Tq, 1), 0 for queries without far tokens.
        """
        with torch.no_grad():
            chosen = self.nearest(q, keys, mask, self.top)
        visible = mask[:, None].expand(-1, q.shape[1], -1, -1).gather(-1, chosen)
        scores = (q[..., None, :] * gather_slots(keys, chosen)).sum(-1) * self.size**-0.5
        weight = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
        g = self.gate.sigmoid()[:, None, None] * visible.any(-1, keepdim=True)
        return chosen, apply_dropout(weight * visible, self.kernel.active_dropout), g
