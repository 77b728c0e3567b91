"""Base classes of output heads, and the datastore whose nearest keys they read."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from rlxf.utils.checks import PythonNumbers, check_choice, check_int, check_positive
from rlxf.utils.extras import import_faiss


class Neighbors(NamedTuple):
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

    Its size is ``4 N (C + A) + 8 N`` bytes with float32 keys and values.

    Args:
        keys: (N, C), outputs of a transformer.
        values: (N, ...), values that are mixed into predictions near a key, with A numbers each.
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

    def neighbors(self, queries: Tensor, entries: Tensor) -> Neighbors:
        """Return the pairs ``entries`` int64 (B, k) sorted by their distance from the queries (B, C)."""
        squared = (self.keys[entries] - queries[:, None]).square().sum(dim=-1)
        squared, order = squared.sort(dim=1, stable=True)
        return Neighbors(squared, self.values[entries.gather(1, order)])

    def check_k(self, k: int) -> None:
        """Raise ValueError if there are fewer than k pairs."""
        if k > len(self):
            raise ValueError(f"k must be at most the number of pairs, {len(self)}, got k={k}")


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

    def __call__(self, queries: Tensor, k: int, excluded_group: Tensor | None = None) -> Tensor:
        """Return the k nearest pairs of each query.

        Args:
            queries: (B, C).
            k: number of neighbors.
            excluded_group: int64 (B,), group to exclude for each query; None for none.

        Raises:
            ValueError: if fewer than k pairs remain.
        """
        self._check_reach(k, excluded_group)
        size = max(k, MAX_SCORES // max(1, len(queries)))
        results = [
            self._nearest(queries, k, excluded_group, range(start, min(start + size, len(self.store))))
            for start in range(0, len(self.store), size)
        ]
        scores, entries = (torch.cat(parts, dim=1) for parts in zip(*results, strict=True))
        return entries.gather(1, scores.topk(k, dim=1, largest=False).indices)

    def _check_reach(self, k: int, excluded_group: Tensor | None) -> None:
        self.store.check_k(k)
        remaining = len(self.store) - self.store.largest_group
        if excluded_group is not None and k > remaining:
            raise ValueError(
                f"k={k} neighbors from other groups are required, but without its largest group of "
                f"{self.store.largest_group} pairs the datastore has {remaining}; use a smaller k or store "
                f"more groups"
            )

    def _nearest(
        self, queries: Tensor, k: int, excluded_group: Tensor | None, chunk: range
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices, both (B, <= k), of the nearest pairs in a chunk of keys."""
        part = slice(chunk.start, chunk.stop)
        scores = torch.addmm(self._lengths[part], queries - self._mean, self.store.keys[part].T, alpha=-2)
        if excluded_group is not None:
            scores.masked_fill_(self.store.groups[part] == excluded_group[:, None], torch.inf)
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
        self._index.add(store.keys.float().contiguous().numpy(force=True))

    def __call__(self, queries: Tensor, k: int) -> Tensor:
        """Return the k nearest pairs of each query.

        Raises:
            ValueError: if there are fewer than k pairs.
        """
        self.store.check_k(k)
        entries = self._index.search(queries.float().contiguous().numpy(force=True), k)[1]
        return torch.from_numpy(entries).to(queries.device)


SEARCHES: dict[str, type[TorchSearch] | type[FaissSearch]] = {"torch": TorchSearch, "faiss": FaissSearch}
"""Search classes by the value of `OutputHead.index`."""


@dataclass(frozen=True)
class OutputHead(PythonNumbers, ABC):
    """Base of the output heads: frozen dataclasses with the options of the neighbor search.

    Args:
        k: number of neighbors.
        temperature: temperature T of the distance weights.
        index: search backend: "torch", or "faiss", which needs the extra ``knn``. Results are equal.

    Raises:
        TypeError: if k is not an int, or another numeric option is not a number.
        ValueError: if k is less than 1, temperature is not positive and finite, or the index is unknown.
    """

    paper: ClassVar[str]
    causal_form: ClassVar[str] = "token by token"
    cost: ClassVar[str] = "L N, for N stored steps"
    k: int = 32
    temperature: float = 1.0
    index: str = "torch"

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_int(f"{name} k", self.k)
        check_positive(f"{name} temperature", self.temperature)
        check_choice(f"{name} index", self.index, tuple(SEARCHES))

    def weights(self, near: Neighbors) -> Tensor:
        """Return the weights of the neighbors, ``exp(-d_i^2 / T)`` divided by their sum, (B, k)."""
        return distance_weights(near.squared, self.temperature)

    @abstractmethod
    def build(self, width: int) -> "OutputHeadModule":
        """Build the module for transformer outputs of the given width."""


def distance_weights(distance: Tensor, temperature: float) -> Tensor:
    """Return ``exp(-d_i / T)`` divided by the sum over i, for distances d (B, k)."""
    nearest = distance.amin(dim=1, keepdim=True)  # subtracted first, as d / T may overflow
    return ((nearest - distance) / temperature).softmax(dim=1)


class OutputHeadModule(nn.Module, ABC):
    """Base of the modules that output heads build."""

    @abstractmethod
    def neighbor_weight(self, h: Tensor) -> Tensor:
        """Return the mixing weight of the neighbors for continuous values: h (B, C) -> (B,), from 0 to 1."""

    @abstractmethod
    def log_prob(self, h: Tensor, near: Neighbors, weight: Tensor, bias: Tensor) -> Tensor:
        """Return ``log p(v | h)`` of each of V discrete values.

        Args:
            h: outputs of the transformer, (B, C).
            near: their neighbors, with values int64 (B, k) from 0 to V - 1.
            weight: weight of the model's logit layer, (V, C).
            bias: bias of the model's logit layer, (V,).

        Returns:
            (B, V).
        """
