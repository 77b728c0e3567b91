"""Exact search for the nearest keys of a datastore."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlxf.attention.heads.datastore import Datastore
from rlxf.attention.with_faiss import as_faiss, faiss

Search = Callable[[Tensor, int], Tensor]
"""Queries (B, C), k -> int64 (B, k): indices of the pairs with the nearest keys, with ties in any order."""

SCORES = 2**22
"""Maximum number of distances in memory at a time, over all queries: 16 MB in float32."""


class TorchSearch:
    """Exact search ``argmin_j |k_j - m|^2 - 2 k_j . (q - m)`` by matrix products and ``torch.topk``.

    m is the mean of the keys. The score equals ``|k_j - q|^2`` up to a constant, and m keeps it accurate for
    keys far from 0. Keys are processed in chunks, whose length is bounded by `SCORES`. Distances that differ
    by less than rounding errors, about 1e-6 of ``|k| |q - m|``, count as equal.
    """

    def __init__(self, store: Datastore):
        self.store = store
        self._mean = store.keys.mean(dim=0)
        self._lengths = (store.keys - self._mean).square().sum(dim=1)

    def __call__(self, queries: Tensor, k: int, without: Tensor | None = None) -> Tensor:
        """Return the k nearest pairs of each query.

        Args:
            queries: (B, C).
            k: number of neighbours.
            without: int64 (B,), group to exclude for each query; None for none.

        Raises:
            ValueError: if fewer than k pairs remain.
        """
        self._check_reach(k, without)
        size = max(k, SCORES // max(1, len(queries)))
        results = [
            self._nearest(queries, k, without, range(start, min(start + size, len(self.store))))
            for start in range(0, len(self.store), size)
        ]
        scores, entries = (torch.cat(parts, dim=1) for parts in zip(*results, strict=True))
        return entries.gather(1, scores.topk(k, dim=1, largest=False).indices)

    def _check_reach(self, k: int, without: Tensor | None) -> None:
        self.store.check_reach(k)
        remaining = len(self.store) - self.store.largest_group
        if without is not None and k > remaining:
            raise ValueError(
                f"k={k} neighbours from other groups are required, but without its largest group of "
                f"{self.store.largest_group} pairs the datastore has {remaining}; use a smaller k or store "
                f"more groups"
            )

    def _nearest(
        self, queries: Tensor, k: int, without: Tensor | None, chunk: range
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices, both (B, <= k), of the nearest pairs in a chunk of keys."""
        part = slice(chunk.start, chunk.stop)
        scores = torch.addmm(self._lengths[part], queries - self._mean, self.store.keys[part].T, alpha=-2)
        if without is not None:
            scores.masked_fill_(self.store.groups[part] == without[:, None], torch.inf)
        nearest = scores.topk(min(k, len(chunk)), dim=1, largest=False)
        return nearest.values, nearest.indices + chunk.start


class FaissSearch:
    """Exact search with a flat faiss index, which stores a float32 copy of the keys on the CPU.

    Raises:
        ImportError: if faiss is not installed.
    """

    def __init__(self, store: Datastore):
        self.store = store
        self._index = faiss().IndexFlatL2(store.keys.shape[1])
        self._index.add(as_faiss(store.keys))

    def __call__(self, queries: Tensor, k: int) -> Tensor:
        """Return the k nearest pairs of each query.

        Raises:
            ValueError: if there are fewer than k pairs.
        """
        self.store.check_reach(k)
        entries = self._index.search(as_faiss(queries), k)[1]
        return torch.from_numpy(entries).to(queries.device)


SEARCHES: dict[str, type[TorchSearch] | type[FaissSearch]] = {"torch": TorchSearch, "faiss": FaissSearch}
"""Search classes by the value of `OutputHead.index`."""
