"""Process group of data-parallel training with torch.distributed: gloo on CPUs, NCCL on GPUs."""

import atexit
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before `join`, see there
from torch import Tensor, nn

from rlxf.training.archive import Archive
from rlxf.training.distributed.group import ProcessGroup, Work
from rlxf.training.distributed.rendezvous import unused_prefix
from rlxf.training.serialization import dump_json, dump_tensors, load_json, load_tensors

TIMEOUT = timedelta(hours=1)
"""Timeout of collectives; long, as rank 0 may evaluate meanwhile. Dead processes are detected at once."""
GLOO = re.compile(r"\[\S*gloo/transport/")
"""Source location in the message of gloo's connection errors, which are of type RuntimeError."""


class TorchProcessGroup(ProcessGroup):
    """One rank of a process group that torchrun started.

    All gradients are summed in a single all-reduce. The loss of each rank is weighted by its number of valid
    steps. The result equals the gradient of a single process on the whole batch, also if ranks have different
    numbers of valid steps. In contrast, torch's ``DistributedDataParallel`` weights all ranks equally.

    Methods with collectives raise ConnectionError if another process has died.

    Args:
        rank: rank of this process.
        world_size: number of processes.
    """

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size

    @classmethod
    def join(cls) -> Self:
        """Initialize torch.distributed from the environment variables of torchrun.

        The module ``torch.distributed.nn.functional`` is imported before, because its functions have the
        current process group as default argument. If it was imported afterwards, they would keep the group
        and its threads alive until the interpreter shuts down, where a thread that releases a tensor aborts
        the process.

        Raises:
            ValueError: if this machine has GPUs, but fewer than processes.
            ConnectionError: if another process does not connect.
        """
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        backend = _backend(int(os.environ["LOCAL_RANK"]))
        with _connection_errors(count):
            store, _, _ = next(dist.rendezvous("env://", rank, count, timeout=TIMEOUT))
            fresh = unused_prefix(store, rank, count, TIMEOUT)
            dist.init_process_group(backend, timeout=TIMEOUT, store=fresh, rank=rank, world_size=count)
        atexit.register(dist.destroy_process_group)  # its threads must end before interpreter shutdown
        return cls(rank, count)

    def local_rows(self, x: Tensor) -> Tensor:
        """See `ProcessGroup`."""
        return x[self.row_slice(len(x) // self.world_size)]

    def embed_rows(self, x: Tensor) -> Tensor:
        """See `ProcessGroup`."""
        padded = x.new_zeros(self.world_size * len(x), *x.shape[1:])
        padded[self.row_slice(len(x))] = x
        return padded

    def local_indices(self, chosen: Tensor, number: int) -> Tensor:
        """See `ProcessGroup`."""
        rows = self.row_slice(number)
        return chosen[(chosen >= rows.start) & (chosen < rows.stop)] - rows.start

    def reduce_means(self, parts: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
        """See `ProcessGroup`."""
        values = torch.stack([*(part.detach() for part in parts.values()), torch.ones_like(parts["loss"])])
        sums = values.detach().double() * weight
        self._all_reduce(sums)
        total = sums[-1].clamp(min=1)
        means = dict(zip(parts, (sums[:-1] / total).to(values.dtype), strict=True))
        local = parts["loss"] * (weight / total).to(values.dtype)
        return means | {"loss": local + (means["loss"] - local).detach()}

    def all_reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """See `ProcessGroup`. A missing gradient counts as 0; if it is missing on all ranks, it stays
        None.
        """
        trainable = [each for each in parameters if each.requires_grad]
        present = torch.tensor([each.grad is not None for each in trainable]).to(trainable[0])
        flat = torch.cat([*(_gradient(each) for each in trainable), present])
        self._all_reduce(flat)
        *sums, counts = flat.split([*(each.numel() for each in trainable), len(trainable)])
        for each, total, present_ranks in zip(trainable, sums, counts.tolist(), strict=True):
            each.grad = total.view_as(each).to(each.dtype) if present_ranks else None

    def all_gather(self, x: Tensor) -> Tensor:
        """See `ProcessGroup`."""
        if x.dtype == torch.bool:
            return self.all_gather(x.view(torch.uint8)).view(torch.bool)
        return torch.cat(self._all_gather(x))

    def gather_archives(self, own: Archive) -> list[Archive]:
        """See `ProcessGroup`."""
        documents = [load_json(data) for data in self._gather_bytes(dump_json(own.documents))]
        groups = [
            [load_tensors(data) for data in self._gather_bytes(dump_tensors(group))]
            for group in own.tensors.values()
        ]
        return [
            Archive(document, dict(zip(own.tensors, tensors, strict=True)))
            for document, *tensors in zip(documents, *groups, strict=True)
        ]

    def all_reduce_max(self, number: int) -> int:
        """See `ProcessGroup`."""
        return int(self.all_gather(torch.tensor([number])).max())

    def barrier(self) -> None:
        """See `ProcessGroup`."""
        self.all_reduce_max(0)

    def main_first(self, work: Callable[[], Work]) -> Work:
        """See `ProcessGroup`."""
        if self.is_main:
            done = work()
            self.barrier()
            return done
        self.barrier()
        return work()

    @torch.no_grad()
    def broadcast_module(self, module: nn.Module, order: torch.Generator) -> None:
        """See `ProcessGroup`."""
        with _connection_errors(self.world_size):
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, 0)
        order.set_state(self._broadcast(order.get_state()))

    def broadcast_rng_state(self) -> None:
        """See `ProcessGroup`."""
        torch.set_rng_state(self._broadcast(torch.get_rng_state()))
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(self._broadcast(torch.cuda.get_rng_state()))

    @contextmanager
    def rank_rng(self, order: torch.Generator) -> Iterator[None]:
        """See `ProcessGroup`."""
        copy = torch.Generator()
        copy.set_state(order.get_state())
        common = int(torch.randint(2**31, (), generator=copy))
        seed = np.random.SeedSequence([common, self.rank]).generate_state(1)[0]
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(int(seed))
            yield

    def check_single_process(self, what: str) -> None:
        """See `ProcessGroup`."""
        raise ValueError(
            f"{what} supports a single process, got {self.world_size}: start it without torchrun"
        )

    def check_equal_on_ranks(self, numbers: Mapping[str, int]) -> None:
        """See `ProcessGroup`."""
        values = self.all_gather(torch.tensor([list(numbers.values())]))
        for name, column in zip(numbers, values.T.tolist(), strict=True):
            if len(set(column)) > 1:
                raise ValueError(f"{name} must be the same in all processes, got {column} by rank")

    def _broadcast(self, x: Tensor) -> Tensor:
        with _connection_errors(self.world_size):
            dist.broadcast(x, 0)
        return x

    def _all_reduce(self, x: Tensor) -> None:
        """Replace x in place by its sum over all ranks."""
        with _connection_errors(self.world_size):
            dist.all_reduce(x)

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        outputs = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.world_size)]
        with _connection_errors(self.world_size):
            dist.all_gather(outputs, x.contiguous())
        return outputs

    def _gather_bytes(self, own: bytes) -> Sequence[bytes]:
        """Gather byte strings of different lengths from all ranks."""
        lengths = self.all_gather(torch.tensor([len(own)])).tolist()
        padded = torch.frombuffer(bytearray(own.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        outputs = self._all_gather(padded)
        return [each.numpy().tobytes()[:length] for each, length in zip(outputs, lengths, strict=True)]


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.detach().flatten()


def _backend(local_rank: int) -> str:
    """Return the backend for torch.distributed; if there are GPUs, select the one of the local rank."""
    if not torch.cuda.is_available():
        return "gloo"
    gpus = torch.cuda.device_count()
    if local_rank >= gpus:
        raise ValueError(
            f"there are more processes than GPUs on this machine ({gpus}): start torchrun with "
            f"--nproc-per-node {gpus}, or set CUDA_VISIBLE_DEVICES= to train on CPU"
        )
    torch.cuda.set_device(local_rank)
    return "cpu:gloo,cuda:nccl"


@contextmanager
def _connection_errors(count: int) -> Iterator[None]:
    """Convert torch's errors about lost or unresponsive processes to ConnectionError.

    Raises:
        ConnectionError: in place of DistError and of gloo's connection errors; other errors propagate.
    """
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or GLOO.search(str(error))):
            raise
        raise ConnectionError(
            f"another of the {count} processes ended or did not respond: see its output and the report of "
            f"torchrun for the cause"
        ) from error
