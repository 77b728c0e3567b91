"""Datastore of key-value pairs for retrieval."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor


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

    def check_reach(self, k: int) -> None:
        """Raise ValueError if there are fewer than k pairs."""
        if k > len(self):
            raise ValueError(f"k must be at most the number of pairs, {len(self)}, got k={k}")
