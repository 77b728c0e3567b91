"""Data-parallel training under torchrun: the current process group, with gloo on CPUs and NCCL on GPUs."""

import atexit
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Self, cast
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlxf.training.archive import Archive
from rlxf.training.process_group import ProcessGroup, Work
from rlxf.training.serialization import dump_tensors, load_tensors
from rlxf.training.strict_json import dump_json, load_json
from rlxf.utils.errors import NumericalError

TIMEOUT = timedelta(hours=1)
"""Timeout of collectives; long, as rank 0 may evaluate meanwhile. Dead processes are detected at once."""
GLOO = re.compile(r"\[\S*gloo/transport/")
"""Source location in the message of gloo's connection errors, which are of type RuntimeError."""
POLL_INTERVAL = 0.01
"""Polling interval of rank 0, in seconds."""
REQUEST = "rlxf/request of {}"
REPLY = "rlxf/reply to {}"
ACKNOWLEDGEMENT = "rlxf/{} acknowledged by {}"
"""Keys of the rendezvous in torchrun's store, by rank, by request, and by prefix and rank."""

_groups: list[ProcessGroup] = [ProcessGroup()]


def process_group() -> ProcessGroup:
    """Return the current process group: a single process, unless `init_process_group` was called under
    torchrun.

    Like torch's default process group, it is global to the process and is not passed as an argument.
    """
    return _groups[-1]


def init_process_group() -> ProcessGroup:
    """Initialize the process group from torchrun's environment variables; without torchrun, do nothing.

    Call this function before you construct an agent: the agent uses the group that `process_group` returns
    at that moment. Afterwards ``n_envs``, ``batch_size`` and numbers of steps are totals over all processes.

    Returns:
        The current process group.

    Raises:
        ValueError: if a machine has GPUs, but fewer GPUs than processes, or WORLD_SIZE is set without the
            other variables of torchrun.
        ConnectionError: if another process does not connect.
    """
    if process_group().world_size == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _groups.append(TorchProcessGroup.join())
    return process_group()


TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class TorchProcessGroup(ProcessGroup):
    """One rank of a process group that torchrun started; the methods are those of `ProcessGroup`.

    All gradients are summed in a single all-reduce. The loss of each rank is weighted by its number of valid
    steps. The result equals the gradient of a single process on the whole batch, even if ranks have different
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
        current process group as default argument. If it were imported afterwards, they would keep the group
        and its threads alive until the interpreter shuts down, when a thread that releases a tensor aborts
        the process.

        Raises:
            ValueError: if this machine has GPUs, but fewer GPUs than processes, or a variable is missing.
            ConnectionError: if another process does not connect.
        """
        import torch.distributed.nn.functional  # noqa: F401  # see above

        missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
        if missing:
            raise ValueError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set: start the "
                f"processes with torchrun, or remove WORLD_SIZE to train in one process"
            )
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        backend = _backend(int(os.environ["LOCAL_RANK"]))
        with _connection_errors(count):
            store, _, _ = next(dist.rendezvous("env://", rank, count, timeout=TIMEOUT))
            fresh = rendezvous_store(store, rank, count, TIMEOUT)
            dist.init_process_group(backend, timeout=TIMEOUT, store=fresh, rank=rank, world_size=count)
        atexit.register(dist.destroy_process_group)  # its threads must end before interpreter shutdown
        return cls(rank, count)

    def local_rows(self, x: Tensor) -> Tensor:
        return x[self.row_slice(len(x) // self.world_size)]

    def embed_rows(self, x: Tensor) -> Tensor:
        padded = x.new_zeros(self.world_size * len(x), *x.shape[1:])
        padded[self.row_slice(len(x))] = x
        return padded

    def local_indices(self, chosen: Tensor, rows_per_rank: int) -> Tensor:
        rows = self.row_slice(rows_per_rank)
        return chosen[(chosen >= rows.start) & (chosen < rows.stop)] - rows.start

    def reduce_means(self, parts: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
        values = torch.stack([*(part.detach() for part in parts.values()), torch.ones_like(parts["loss"])])
        sums = values.double() * weight
        self._all_reduce(sums)
        total = sums[-1].clamp(min=1)
        means = dict(zip(parts, (sums[:-1] / total).to(values.dtype), strict=True))
        local = parts["loss"] * (weight / total).to(values.dtype)
        return means | {"loss": local + (means["loss"] - local).detach()}

    def weight_fraction(self, weight: Tensor) -> Tensor:
        total = weight.double().clone()
        self._all_reduce(total)
        return weight / total.clamp(min=1)

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
        if x.dtype == torch.bool:
            return self.all_gather(x.view(torch.uint8)).view(torch.bool)
        outputs = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.world_size)]
        with _connection_errors(self.world_size):
            dist.all_gather(outputs, x.contiguous())
        return torch.cat(outputs)

    def gather_archives(self, own: Archive) -> list[Archive]:
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
        return int(self.all_gather(torch.tensor([number])).max())

    def barrier(self) -> None:
        self.all_reduce_max(0)

    def main_first(self, work: Callable[[], Work]) -> Work:
        if self.is_main:
            done = work()
            self.barrier()
            return done
        self.barrier()
        return work()

    def fail_together(self, work: Callable[[], Work]) -> Work:
        try:
            done, error = work(), None
        except NumericalError as raised:
            done, error = None, raised
        if self.all_reduce_max(error is not None):
            raise error or NumericalError("a number is not finite in another process; see its message")
        return cast(Work, done)

    @torch.no_grad()
    def broadcast_module(self, module: nn.Module, order: torch.Generator) -> None:
        for tensor in module.state_dict().values():
            self._broadcast(tensor)
        order.set_state(self._broadcast(order.get_state()))

    def broadcast_rng_state(self) -> None:
        torch.set_rng_state(self._broadcast(torch.get_rng_state()))
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(self._broadcast(torch.cuda.get_rng_state()))

    @contextmanager
    def rank_rng(self, order: torch.Generator) -> Iterator[None]:
        copy = torch.Generator()
        copy.set_state(order.get_state())
        common = int(torch.randint(2**31, (), generator=copy))
        seed = np.random.SeedSequence([common, self.rank]).generate_state(1)[0]
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(int(seed))
            yield

    def check_single_process(self, what: str) -> None:
        raise ValueError(
            f"{what} supports a single process, got {self.world_size}: start it without torchrun"
        )

    def check_equal_on_ranks(self, numbers: Mapping[str, int]) -> None:
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

    def _gather_bytes(self, own: bytes) -> Sequence[bytes]:
        """Gather byte strings of different lengths from all ranks."""
        lengths = self.all_gather(torch.tensor([len(own)])).tolist()
        padded = torch.frombuffer(bytearray(own.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        outputs = self.all_gather(padded).split(max(lengths))
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


def rendezvous_store(store: "dist.Store", rank: int, count: int, timeout: timedelta) -> "dist.Store":
    """Return a view of the store under an unused prefix.

    The prefix is the same for all processes that were started together.

    torchrun keeps one store during its lifetime. Restarted processes find the entries of their predecessors
    there, such as addresses of dead processes. The restart count is not a unique prefix: each machine counts
    its own restarts, does not count changes of membership, and starts at 0 when it joins. Rank 0 therefore
    generates a UUID as prefix. Each other rank requests the prefix under a fresh UUID of its own, so replies
    to earlier, dead processes cannot be mistaken for its own, and acknowledges the reply.

    Args:
        store: store of torchrun.
        rank: rank of this process.
        count: number of processes (world size).
        timeout: timeout of rank 0; other ranks use the timeout of the store.

    Raises:
        ConnectionError: if rank 0 reaches its timeout.
        DistStoreError: if another rank reaches the timeout, or the store is closed.
    """
    prefix = _request_prefix(store, rank) if rank else _publish_prefix(store, set(range(1, count)), timeout)
    return dist.PrefixStore(prefix, store)


def _request_prefix(store: "dist.Store", rank: int) -> str:
    """Request the prefix from rank 0, wait for the reply and acknowledge it."""
    request = uuid4().hex
    store.set(REQUEST.format(rank), request)
    prefix = store.get(REPLY.format(request)).decode()
    store.set(ACKNOWLEDGEMENT.format(prefix, rank), "")
    return str(prefix)


def _publish_prefix(store: "dist.Store", waiting: set[int], timeout: timedelta) -> str:
    """Generate a prefix and reply to requests until all other ranks have acknowledged it.

    The request of a rank may be that of a dead process until the new process overwrites it. Replies are
    therefore repeated until the acknowledgement.
    """
    prefix = uuid4().hex
    end = time.monotonic() + timeout.total_seconds()
    while waiting:
        if time.monotonic() > end:
            raise ConnectionError(f"the processes of rank {sorted(waiting)} did not connect within {timeout}")
        for rank in waiting:
            if store.check([REQUEST.format(rank)]):
                store.set(REPLY.format(store.get(REQUEST.format(rank)).decode()), prefix)
        waiting = {rank for rank in waiting if not store.check([ACKNOWLEDGEMENT.format(prefix, rank)])}
        time.sleep(POLL_INTERVAL)
    return prefix
