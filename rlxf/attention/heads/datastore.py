"""Datastore of outputs and actions, and the search for its nearest keys."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from rlxf.attention.faiss_support import import_faiss, to_faiss_array


class Neighbours(NamedTuple):
    """Nearest k pairs of each of B queries.

    Args:
        squared: (B, k), squared L2 distances of the keys, ascending.
        values: (B, k, ...), values of the pairs.
    """

    squared: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class Datastore:
    """N pairs of a transformer output and the value that followed it.

    Its size is ``4 N (C + A) + 8 N`` bytes in float32.

    Args:
        keys: (N, C), outputs of a transformer.
        values: (N, ...), values that are mixed in near a key; A numbers each.
        groups: int64 (N,), group of each pair, for example its episode. A search can exclude a group.

    Raises:
        ValueError: if there is no pair, the lengths N differ, or a key is not finite.
    """

    keys: Tensor
    values: Tensor
    groups: Tensor

    def __post_init__(self) -> None:
        shapes = [tuple(getattr(self, field.name).shape) for field in fields(self)]
        if len(self.keys.shape) != 2 or len({shape[:1] for shape in shapes}) != 1 or not len(self):
            raise ValueError(
                f"a datastore needs keys (N, C), values (N, ...) and groups (N,) with N >= 1, got shapes "
                f"{', '.join(map(str, shapes))}"
            )
        if not self.keys.isfinite().all():
            raise ValueError("keys of a datastore must be finite, but at least one is NaN or infinite")

    def __len__(self) -> int:
        """Return the number of pairs N."""
        return len(self.keys)

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on the given device."""
        return type(self)(*(getattr(self, field.name).to(device) for field in fields(self)))

    @cached_property
    def largest_group(self) -> int:
        """Number of pairs in the largest group."""
        return int(self.groups.unique(return_counts=True)[1].max())

    def neighbours(self, queries: Tensor, entries: Tensor) -> Neighbours:
        """Return the pairs ``entries`` int64 (B, k) sorted by their distance from the queries (B, C)."""
        squared = (self.keys[entries] - queries[:, None]).square().sum(dim=-1)
        squared, order = squared.sort(dim=1, stable=True)
        return Neighbours(squared, self.values[entries.gather(1, order)])

    def check_k(self, k: int) -> None:
        """Raise ValueError if there are fewer than k pairs."""
        if k > len(self):
            raise ValueError(f"k must be at most the number of pairs, {len(self)}, got k={k}")


Search = Callable[[Tensor, int], Tensor]
"""Queries (B, C), k -> int64 (B, k): indices of the pairs with the nearest keys, with ties in any order."""

MAX_SCORES = 2**22
"""Maximum number of distances in memory at a time, over all queries: 16 MB in float32."""


class TorchSearch:
    """Exact search ``argmin_j |k_j - m|^2 - 2 k_j . (q - m)`` by matrix products and ``torch.topk``.

    m is the mean of the keys. The score equals ``|k_j - q|^2`` up to a constant, and m keeps it accurate for
    keys far from 0. Keys are processed in chunks, whose length is bounded by `MAX_SCORES`. Distances that
    differ by less than rounding errors, about 1e-6 of ``|k| |q - m|``, count as equal.
    """

    def __init__(self, store: Datastore):
        self.store = store
        self._mean = store.keys.mean(dim=0)
        self._lengths = (store.keys - self._mean).square().sum(dim=1)

    def __call__(self, queries: Tensor, k: int, without: Tensor | None = None) -> Tensor:
        """Return the k nearest pairs of each query.

        Args:
            queries: (B, C).
            k: number of neighbors.
            without: int64 (B,), group to exclude for each query; None for none.

        Raises:
            ValueError: if fewer than k pairs remain.
        """
        self._check_reach(k, without)
        size = max(k, MAX_SCORES // max(1, len(queries)))
        results = [
            self._nearest(queries, k, without, range(start, min(start + size, len(self.store))))
            for start in range(0, len(self.store), size)
        ]
        scores, entries = (torch.cat(parts, dim=1) for parts in zip(*results, strict=True))
        return entries.gather(1, scores.topk(k, dim=1, largest=False).indices)

    def _check_reach(self, k: int, without: Tensor | None) -> None:
        self.store.check_k(k)
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
        self._index = import_faiss().IndexFlatL2(store.keys.shape[1])
        self._index.add(to_faiss_array(store.keys))

    def __call__(self, queries: Tensor, k: int) -> Tensor:
        """Return the k nearest pairs of each query.

        Raises:
            ValueError: if there are fewer than k pairs.
        """
        self.store.check_k(k)
        entries = self._index.search(to_faiss_array(queries), k)[1]
        return torch.from_numpy(entries).to(queries.device)


SEARCHES: dict[str, type[TorchSearch] | type[FaissSearch]] = {"torch": TorchSearch, "faiss": FaissSearch}
"""Search classes by the value of `OutputHead.index`."""
