"""Pairs of a key and a value, and which of them are near."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Neighbours(NamedTuple):
    """The k pairs that are nearest to each of B queries.

    Args:
        squared: (B, k), squared L2 distances of their keys, ascending.
        values: (B, k, ...).
    """

    squared: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class Datastore:
    """N pairs: what was thought, and what followed. A plain value of ``4 N (C + A) + 8 N`` bytes in float32.

    Args:
        keys: (N, C), outputs of a transformer.
        values: (N, ...), what is mixed in where such an output comes up again; A numbers each.
        groups: int64 (N,), where each pair is from, for example its episode. Pairs of one group can be left
            out together.

    Raises:
        ValueError: if there is no pair, the three differ in N, or a key is not finite.
    """

    keys: Tensor
    values: Tensor
    groups: Tensor

    def __post_init__(self) -> None:
        shapes = [tuple(getattr(self, field.name).shape) for field in fields(self)]
        if len(self.keys.shape) != 2 or len({shape[:1] for shape in shapes}) != 1 or not len(self):
            raise ValueError(
                f"a datastore needs keys (N, C), values (N, ...) and groups (N,) with N at least 1, got "
                f"{', '.join(map(str, shapes))}"
            )
        if not self.keys.isfinite().all():
            raise ValueError("a key of the datastore is NaN or infinite")

    def __len__(self) -> int:
        """N"""
        return len(self.keys)

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        return type(self)(*(getattr(self, field.name).to(device) for field in fields(self)))

    @cached_property
    def largest_group(self) -> int:
        """Pairs of the group that has most."""
        return int(self.groups.unique(return_counts=True)[1].max())

    def neighbours(self, queries: Tensor, entries: Tensor) -> Neighbours:
        """The pairs ``entries`` int64 (B, k) as seen from the queries (B, C), the nearest first."""
        squared = (self.keys[entries] - queries[:, None]).square().sum(dim=-1)
        squared, order = squared.sort(dim=1, stable=True)
        return Neighbours(squared, self.values[entries.gather(1, order)])

    def check_reach(self, k: int) -> None:
        """Raise ValueError unless there are k pairs."""
        if k > len(self):
            raise ValueError(f"k={k} neighbours were asked for, there are {len(self)} pairs: lower k")
