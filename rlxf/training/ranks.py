"""The processes of one training, seen from one of them: what they share and agree on."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from rlxf.training.archive import Archive

Work = TypeVar("Work")


class Ranks:
    """One process by itself: all there is is its own, and nothing is sent.

    `RankGroup` is the same of several. Each method that talks to others has to be called by all of them, in
    the same order.

    Attributes:
        rank: the number of this process, from 0.
        count: how many there are.
    """

    rank = 0
    count = 1

    @property
    def writes(self) -> bool:
        """Whether this is the process that writes files and logs: that of rank 0."""
        return self.rank == 0

    def part(self, name: str, total: int) -> int:
        """This one's share of a number.

        Raises:
            ValueError: if it cannot be divided among the processes.
        """
        if total % self.count:
            raise ValueError(
                f"{name} is {total} over all, and cannot be divided among {self.count} processes: choose a "
                f"multiple of {self.count}"
            )
        return total // self.count

    def rows(self, number: int) -> slice:
        """Where this one's rows are among those of all, of which each has ``number``."""
        return slice(self.rank * number, (self.rank + 1) * number)

    def numbers(self, number: int) -> range:
        """Of this one's rows among those of all, of which each has ``number``."""
        return range(self.count * number)[self.rows(number)]

    def own(self, x: Tensor) -> Tensor:
        """This one's rows of those of all, (count N, ...) -> (N, ...)."""
        return x

    def among_all(self, x: Tensor) -> Tensor:
        """Rows (N, ...) at their place among those of all, (count N, ...); the others are 0."""
        return x

    def own_numbers(self, chosen: Tensor, number: int) -> Tensor:
        """Those of the chosen rows (B,) of all that are this one's, counted from its first.

        Args:
            chosen: numbers of rows.
            number: rows that each process has.
        """
        return chosen

    def pooled(self, parts: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
        """Means over what all processes have, of means over what each has.

        The gradient of "loss" is this one's share of that of the mean: `add_gradients` adds the shares.

        Args:
            parts: "loss", and what else is a mean; a number each.
            weight: how much each was taken over here, a number.
        """
        return parts

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put into each gradient the sum of those of all processes."""

    def gathered(self, x: Tensor) -> Tensor:
        """Rows of all processes, (N, ...) -> (count N, ...)."""
        return x

    def gathered_archives(self, own: Archive) -> list[Archive]:
        """What each of them has."""
        return [own]

    def largest(self, number: int) -> int:
        """The largest of the numbers that they give."""
        return number

    def wait(self) -> None:
        """Until all of them are here."""

    def first_then_all(self, work: Callable[[], Work]) -> Work:
        """Let rank 0 do some work, then all others: they find what it left on the disk."""
        return work()

    def agree(self, module: nn.Module, order: torch.Generator) -> None:
        """Go on with the weights and the generator of rank 0."""

    def agree_generators(self) -> None:
        """Draw from torch's global generators what rank 0 draws."""

    @contextmanager
    def own_draws(self, order: torch.Generator) -> Iterator[None]:
        """Meanwhile, draw from torch's global generators what no other process does.

        Those that all draw from stay where they are.

        Args:
            order: on which all agree; it is not drawn from.
        """
        yield

    def check_alone(self, what: str) -> None:
        """Raise ValueError if there are several processes, as ``what`` is for one."""

    def check_same(self, numbers: Mapping[str, int]) -> None:
        """Raise ValueError unless all processes give the same numbers."""
