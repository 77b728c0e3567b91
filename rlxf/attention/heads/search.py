"""Exact search for the nearest keys of a datastore."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlxf.attention.heads.datastore import Datastore
from rlxf.attention.with_faiss import as_faiss, faiss

Search = Callable[[Tensor, int], Tensor]
"""Queries (B, C), k -> int64 (B, k): the pairs with the nearest keys; of equally near ones, any of them."""

SCORES = 2**22
"""Distances that are held at a time, over all queries: 16 MB in float32."""


class TorchSearch:
    """``argmin_j |k_j - m|^2 - 2 k_j . (q - m)``: a product of matrices and ``torch.topk`` a stretch of keys.

    With m, the mean of the keys, that is ``|k_j - q|^2`` but for what all keys share, however far from 0 they
    lie. Memory is bounded: stretches are as long as `SCORES` allows. Distances that differ by less
    than rounding, about 1e-6 of ``|k| |q - m|``, count as equal.
    """

    def __init__(self, store: Datastore):
        self.store = store
        self._mean = store.keys.mean(dim=0)
        self._lengths = (store.keys - self._mean).square().sum(dim=1)

    def __call__(self, queries: Tensor, k: int, without: Tensor | None = None) -> Tensor:
        """See `Search`. ``without`` int64 (B,): the group that is left out, for each query.

        Raises:
            ValueError: if fewer than k pairs are left.
        """
        self._check_reach(k, without)
        size = max(k, SCORES // max(1, len(queries)))
        found = [
            self._nearest(queries, k, without, range(start, min(start + size, len(self.store))))
            for start in range(0, len(self.store), size)
        ]
        scores, entries = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        return entries.gather(1, scores.topk(k, dim=1, largest=False).indices)

    def _check_reach(self, k: int, without: Tensor | None) -> None:
        self.store.check_reach(k)
        left = len(self.store) - self.store.largest_group
        if without is not None and k > left:
            raise ValueError(
                f"k={k} neighbours from other groups were asked for; without its largest group, of "
                f"{self.store.largest_group} pairs, the datastore has {left}: lower k, or store more groups"
            )

    def _nearest(
        self, queries: Tensor, k: int, without: Tensor | None, stretch: range
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers, both (B, <= k), of the nearest pairs in a stretch."""
        part = slice(stretch.start, stretch.stop)
        scores = torch.addmm(self._lengths[part], queries - self._mean, self.store.keys[part].T, alpha=-2)
        if without is not None:
            scores.masked_fill_(self.store.groups[part] == without[:, None], torch.inf)
        nearest = scores.topk(min(k, len(stretch)), dim=1, largest=False)
        return nearest.values, nearest.indices + stretch.start


class FaissSearch:
    """The same with faiss' flat index, which holds a copy of the keys, on the CPU, in float32.

    Raises:
        ImportError: if faiss is not installed.
    """

    def __init__(self, store: Datastore):
        self.store = store
        self._index = faiss().IndexFlatL2(store.keys.shape[1])
        self._index.add(as_faiss(store.keys))

    def __call__(self, queries: Tensor, k: int) -> Tensor:
        """See `Search`.

        Raises:
            ValueError: if there are fewer than k pairs.
        """
        self.store.check_reach(k)
        entries = self._index.search(as_faiss(queries), k)[1]
        return torch.from_numpy(entries).to(queries.device)


SEARCHES: dict[str, type[TorchSearch] | type[FaissSearch]] = {"torch": TorchSearch, "faiss": FaissSearch}
"""By the name that a head's ``index`` has."""
