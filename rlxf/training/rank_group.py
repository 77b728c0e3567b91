"""Several processes of one training, by torch.distributed: gloo between CPUs, NCCL between GPUs."""

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
from torch import Tensor, nn

from rlxf.training.archive import Archive
from rlxf.training.fresh_store import fresh_part
from rlxf.training.plain_json import dump_json, load_json
from rlxf.training.ranks import Ranks, Work
from rlxf.training.tensor_bytes import dump_tensors, load_tensors

PATIENCE = timedelta(hours=1)
"""How long one waits for another: rank 0 may evaluate meanwhile. Who dies is missed at once."""
GLOO = re.compile(r"\[\S*gloo/transport/")
"""What gloo says of a connection has this in it, the place where it is said; it is a plain RuntimeError."""


class RankGroup(Ranks):
    """One of several processes, as torchrun starts them.

    Gradients are added up in one all-reduce of all of them, each weighted by the steps that it is a mean
    over. That is the gradient of one process with all of the batch, also where some have fewer real steps
    than others; torch's ``DistributedDataParallel`` weighs all processes alike.

    Where another process is gone, any method that talks to it raises ConnectionError.

    Args:
        rank: the number of this process, from 0.
        count: how many there are.
    """

    def __init__(self, rank: int, count: int):
        self.rank, self.count = rank, count

    @classmethod
    def join(cls) -> Self:
        """Meet the others where the environment variables of torchrun say.

        Raises:
            ValueError: if there are more processes than GPUs on a machine that has some.
        """
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        backend = _backend(int(os.environ["LOCAL_RANK"]))
        with _others_there(count):
            store, _, _ = next(dist.rendezvous("env://", rank, count, timeout=PATIENCE))
            fresh = fresh_part(store, rank, count, PATIENCE)
            dist.init_process_group(backend, timeout=PATIENCE, store=fresh, rank=rank, world_size=count)
        atexit.register(dist.destroy_process_group)  # its threads end before what they use
        return cls(rank, count)

    def own(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        return x[self.rows(len(x) // self.count)]

    def among_all(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        every = x.new_zeros(self.count * len(x), *x.shape[1:])
        every[self.rows(len(x))] = x
        return every

    def own_numbers(self, chosen: Tensor, number: int) -> Tensor:
        """See `Ranks`."""
        rows = self.rows(number)
        return chosen[(chosen >= rows.start) & (chosen < rows.stop)] - rows.start

    def pooled(self, parts: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
        """See `Ranks`."""
        numbers = torch.stack([*(part.detach() for part in parts.values()), torch.ones_like(parts["loss"])])
        sums = numbers.detach().double() * weight
        self._add(sums)
        whole = sums[-1].clamp(min=1)
        means = dict(zip(parts, (sums[:-1] / whole).to(numbers.dtype), strict=True))
        share = parts["loss"] * (weight / whole).to(numbers.dtype)
        return means | {"loss": share + (means["loss"] - share).detach()}

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """See `Ranks`. Who has no gradient of a parameter adds 0; where nobody has one, there is none."""
        learned = [each for each in parameters if each.requires_grad]
        there = torch.tensor([each.grad is not None for each in learned]).to(learned[0])
        flat = torch.cat([*(_gradient(each) for each in learned), there])
        self._add(flat)
        *sums, learners = flat.split([*(each.numel() for each in learned), len(learned)])
        for each, total, some in zip(learned, sums, learners.tolist(), strict=True):
            each.grad = total.view_as(each).to(each.dtype) if some else None

    def gathered(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        if x.dtype == torch.bool:
            return self.gathered(x.view(torch.uint8)).view(torch.bool)
        return torch.cat(self._each(x))

    def gathered_archives(self, own: Archive) -> list[Archive]:
        """See `Ranks`."""
        documents = [load_json(data) for data in self._bytes(dump_json(own.documents))]
        groups = [
            [load_tensors(data) for data in self._bytes(dump_tensors(group))]
            for group in own.tensors.values()
        ]
        return [
            Archive(document, dict(zip(own.tensors, found, strict=True)))
            for document, *found in zip(documents, *groups, strict=True)
        ]

    def largest(self, number: int) -> int:
        """See `Ranks`."""
        return int(self.gathered(torch.tensor([number])).max())

    def wait(self) -> None:
        """See `Ranks`."""
        self.largest(0)

    def first_then_all(self, work: Callable[[], Work]) -> Work:
        """See `Ranks`."""
        if self.writes:
            done = work()
            self.wait()
            return done
        self.wait()
        return work()

    @torch.no_grad()
    def agree(self, module: nn.Module, order: torch.Generator) -> None:
        """See `Ranks`."""
        with _others_there(self.count):
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, 0)
        order.set_state(self._of_first(order.get_state()))

    def agree_generators(self) -> None:
        """See `Ranks`."""
        torch.set_rng_state(self._of_first(torch.get_rng_state()))
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(self._of_first(torch.cuda.get_rng_state()))

    @contextmanager
    def own_draws(self, order: torch.Generator) -> Iterator[None]:
        """See `Ranks`."""
        ahead = torch.Generator()
        ahead.set_state(order.get_state())
        common = int(torch.randint(2**31, (), generator=ahead))
        seed = np.random.SeedSequence([common, self.rank]).generate_state(1)[0]
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(int(seed))
            yield

    def check_alone(self, what: str) -> None:
        """See `Ranks`."""
        raise ValueError(f"{what} is for one process, and here are {self.count}: start it without torchrun")

    def check_same(self, numbers: Mapping[str, int]) -> None:
        """See `Ranks`."""
        given = self.gathered(torch.tensor([list(numbers.values())]))
        for name, column in zip(numbers, given.T.tolist(), strict=True):
            if len(set(column)) > 1:
                raise ValueError(f"{name} must be the same in all processes, got {column} by rank")

    def _of_first(self, x: Tensor) -> Tensor:
        with _others_there(self.count):
            dist.broadcast(x, 0)
        return x

    def _add(self, x: Tensor) -> None:
        """Put into x the sum of those of all."""
        with _others_there(self.count):
            dist.all_reduce(x)

    def _each(self, x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.count)]
        with _others_there(self.count):
            dist.all_gather(found, x.contiguous())
        return found

    def _bytes(self, own: bytes) -> Sequence[bytes]:
        """What each of them has, of any lengths."""
        lengths = self.gathered(torch.tensor([len(own)])).tolist()
        padded = torch.frombuffer(bytearray(own.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        found = self._each(padded)
        return [each.numpy().tobytes()[:length] for each, length in zip(found, lengths, strict=True)]


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.detach().flatten()


def _backend(local_rank: int) -> str:
    """Of torch.distributed; where there are GPUs, each process takes the one of its number."""
    if not torch.cuda.is_available():
        return "gloo"
    there = torch.cuda.device_count()
    if local_rank >= there:
        raise ValueError(
            f"this machine has more processes than GPUs, which are {there}: start torchrun with "
            f"--nproc-per-node {there}, or set CUDA_VISIBLE_DEVICES= to train on CPU"
        )
    torch.cuda.set_device(local_rank)
    return "cpu:gloo,cuda:nccl"


@contextmanager
def _others_there(count: int) -> Iterator[None]:
    """What torch raises where another process does not answer, as one error; other errors stay as they are.

    Raises:
        ConnectionError: in place of it.
    """
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or GLOO.search(str(error))):
            raise
        raise ConnectionError(
            f"another of the {count} processes is gone, or did not answer: what it said, and what torchrun "
            f"says of it, tells why"
        ) from error
