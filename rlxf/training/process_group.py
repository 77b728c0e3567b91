"""Interface of a process group for data-parallel training, and its implementation for a single process."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from rlxf.training.archive import Archive

Work = TypeVar("Work")


class ProcessGroup:
    """Process group of a single process, without communication; base class of `TorchProcessGroup`.

    All ranks must call the methods with collectives, in the same order.

    Attributes:
        rank: rank of this process.
        world_size: number of processes.
    """

    rank = 0
    world_size = 1

    @property
    def is_main(self) -> bool:
        """True if this process writes files and logs, i.e. on rank 0."""
        return self.rank == 0

    def split_total(self, name: str, total: int) -> int:
        """Return the part of a total for each process: ``total / world_size``.

        Raises:
            ValueError: if ``total`` is not divisible by the number of processes.
        """
        if total % self.world_size:
            raise ValueError(
                f"{name} is {total} in total, which is not divisible by the {self.world_size} processes: "
                f"choose a multiple of {self.world_size}"
            )
        return total // self.world_size

    def row_slice(self, rows_per_rank: int) -> slice:
        """Return the slice of this rank's rows in a global batch with this number of rows per rank."""
        return slice(self.rank * rows_per_rank, (self.rank + 1) * rows_per_rank)

    def row_indices(self, rows_per_rank: int) -> range:
        """Return the indices of this rank's rows in a global batch with this number of rows per rank."""
        return range(self.world_size * rows_per_rank)[self.row_slice(rows_per_rank)]

    def local_rows(self, x: Tensor) -> Tensor:
        """Return this rank's rows of a global batch, (world_size N, ...) -> (N, ...)."""
        return x

    def embed_rows(self, x: Tensor) -> Tensor:
        """Embed this rank's rows (N, ...) in a global batch (world_size N, ...), other ranks' rows zero."""
        return x

    def local_indices(self, chosen: Tensor, rows_per_rank: int) -> Tensor:
        """Select this rank's rows among global row indices, and convert them to local indices.

        Args:
            chosen: global row indices (B,).
            rows_per_rank: rows of each rank.

        Returns:
            Local row indices, at most B.
        """
        return chosen

    def reduce_means(self, parts: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
        """Return the weighted means over all ranks of scalar means of each rank.

        The gradient of "loss" is this rank's contribution to the gradient of the global mean;
        `all_reduce_gradients` sums the contributions.

        Args:
            parts: scalar means of this rank by name, including "loss".
            weight: scalar weight of this rank, such as its number of valid steps.
        """
        return parts

    def weight_fraction(self, weight: Tensor) -> Tensor:
        """Return the fraction of this rank's scalar weight in the sum of the weights of all ranks.

        It is the factor with which `reduce_means` multiplies the gradient of "loss".
        """
        return torch.ones_like(weight)

    def all_reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradient of each parameter by its sum over all ranks."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather the rows of all ranks, (N, ...) -> (world_size N, ...)."""
        return x

    def gather_archives(self, own: Archive) -> list[Archive]:
        """Gather the archives of all ranks, in the order of ranks."""
        return [own]

    def all_reduce_max(self, number: int) -> int:
        """Return the maximum of ``number`` over all ranks."""
        return number

    def barrier(self) -> None:
        """Wait until all ranks reach this call (barrier)."""

    def main_first(self, work: Callable[[], Work]) -> Work:
        """Call ``work`` on rank 0, then on the other ranks, which can use the files of rank 0."""
        return work()

    def fail_together(self, work: Callable[[], Work]) -> Work:
        """Return the result of ``work``; if it raises NumericalError on one rank, raise it on all ranks.

        Otherwise the other ranks would wait for the one that stopped.
        """
        return work()

    def broadcast_module(self, module: nn.Module, order: torch.Generator) -> None:
        """Broadcast the state of a module and of a generator from rank 0."""

    def broadcast_rng_state(self) -> None:
        """Broadcast the states of torch's global generators from rank 0."""

    @contextmanager
    def rank_rng(self, order: torch.Generator) -> Iterator[None]:
        """Seed torch's global generators differently on each rank within this context.

        The previous states of the global generators are restored at the end.

        Args:
            order: generator with the same state on all ranks, from which the seeds derive. Its state does not
                change.
        """
        yield

    def check_single_process(self, what: str) -> None:
        """Raise ValueError if there are several processes, for a feature ``what`` that supports only one."""

    def check_equal_on_ranks(self, numbers: Mapping[str, int]) -> None:
        """Raise ValueError unless all ranks pass the same numbers."""
