"""Checkpoint files whose writer dies, or that somebody changes."""

import math
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from rich.progress import track

from benchmarks.killed_runs import killed_after
from rlxf.training import Archive, CheckpointError, CheckpointFolder, archive, read_archive, write_archive

NUMBERS = 1_000_000
RUNS_CODE = ("exec", "compile", "import", "os.system", "os.exec", "subprocess.Popen", "pickle.find_class")
MAX_BYTES = 2**24
MOST_SECONDS = 5.0
SPARE = 2**25
"""Bytes that Python and torch may take for themselves, beside twice those of the file."""


@dataclass
class Found:
    """What became of files.

    Args:
        cases: how many.
        refused: those that were refused with a `CheckpointError` that names the file.
        whole: those that were read, and rightly so.
        wrong: all others: read though they were altered, or another error.
        code: events that ran code while they were read.
        seconds: the longest that one took.
        memory: the most bytes that reading one took.
        file: bytes of the whole file.
    """

    cases: int = 0
    refused: int = 0
    whole: int = 0
    wrong: int = 0
    code: int = 0
    seconds: float = 0.0
    memory: int = 0
    file: int = 0

    def missed(self) -> list[str]:
        """What should not have come of them."""
        missed = {
            f"{self.wrong} of {self.cases} were taken, or ended in another error": self.wrong,
            f"{self.code} times code ran": self.code,
            f"one took {self.seconds:.1f} s": self.seconds > MOST_SECONDS,
            f"one took {self.memory:,} bytes for {self.file:,}": self.memory > 2 * self.file + SPARE,
        }
        return [told for told, there in missed.items() if there]


class Mortal:
    """A file whose process dies behind so many bytes."""

    def __init__(self, handle: BinaryIO, left: int):
        self._handle, self._left = handle, left

    def write(self, data: bytes) -> int:
        """As a file; the last bytes are on their way to the disk when the process dies."""
        if len(data) < self._left:
            self._left -= len(data)
            return self._handle.write(data)
        self._handle.write(data[: self._left])
        self._handle.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def content(step: int) -> Archive:
    """What is saved at a step: it can be told from that of another."""
    generator = torch.Generator().manual_seed(step)
    return Archive({"agent": {"step": step}}, {"policy": {"w": torch.randn(NUMBERS, generator=generator)}})


def cut_while_written(cases: int, seed: int, root: Path) -> Found:
    """Writers that die behind a random byte: the newest whole checkpoint must be the one before."""
    chance, found, folder = random.Random(seed), Found(), CheckpointFolder(root / "cut")
    folder.write(0, content(0))
    size = folder.file(0).stat().st_size
    for step in track(range(1, cases + 1), "killed while writing"):
        offset = chance.randrange(1, size)
        killed_after(math.inf, partial(dying, folder, step, offset))
        found.cases += 1
        found.whole += newest_is_whole(folder)
        folder.write(step, content(step))
    found.wrong = found.cases - found.whole
    return found


def dying(folder: CheckpointFolder, step: int, offset: int) -> None:
    """Write a checkpoint, and die amid it."""
    whole: Any = archive.atomic_write
    cut: Any = lambda path, write: whole(path, lambda handle: write(Mortal(handle, offset)))  # noqa: E731
    archive.atomic_write = cut
    folder.write(step, content(step))


def newest_is_whole(folder: CheckpointFolder) -> bool:
    """Whether the newest one can be read and holds what was saved."""
    read = read_archive(folder.newest())
    step = read.documents["agent"]["step"]
    return torch.equal(read.tensors["policy"]["w"], content(step).tensors["policy"]["w"])


def altered(cases: int, seed: int, root: Path) -> Found:
    """A bit flipped, or the end cut off: refused by name, and the one before taken.

    Three of four are flips beside the numbers of the tensor, where a file has few bytes and each counts: each
    of them is hit if there are cases enough. The rest are flips and cuts, evenly over the whole file.
    """
    chance, found, folder = random.Random(seed), Found(), CheckpointFolder(root / "altered")
    folder.write(1, content(1))
    folder.write(2, content(2))
    newest = folder.file(2)
    data = newest.read_bytes()
    places, found.file = beside_numbers(data, content(2)), len(data)
    few = min(len(places), 3 * cases // 4)
    hurt = [partial(flipped, data, place, chance) for place in evenly(places, few)]
    for case, place in enumerate(evenly(range(len(data)), cases - few)):
        hurt.append(partial(flipped, data, place, chance) if case % 2 else partial(cut, data, place))
    for harm in track(hurt, "altered"):
        newest.write_bytes(harm())
        note(found, newest, lambda: folder.newest() == folder.file(1))
    return found


def beside_numbers(data: bytes, held: Archive) -> list[int]:
    """Places of all bytes that say what there is: all but the numbers of the tensor."""
    numbers = held.tensors["policy"]["w"].numpy().tobytes()
    bulk = data.index(numbers)
    return [*range(bulk), *range(bulk + len(numbers), len(data))]


def evenly(places: Sequence[int], number: int) -> list[int]:
    """So many of them, from the first on."""
    return [places[k * len(places) // number] for k in range(number)]


def cut(data: bytes, place: int) -> bytes:
    """What stands before a place."""
    return data[:place]


def flipped(data: bytes, place: int, chance: random.Random) -> bytes:
    """With one bit of a byte turned over."""
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def note(found: Found, path: Path, previous_is_used: Callable[[], bool]) -> None:
    """Read an altered file, and count what came of it."""
    found.cases += 1
    before, start = resident(), time.perf_counter()
    try:
        read_archive(path, MAX_BYTES)
        found.wrong += 1
    except CheckpointError as error:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            right = str(path) in str(error) and previous_is_used()
        found.refused += right
        found.wrong += not right
    found.seconds = max(found.seconds, time.perf_counter() - start)
    found.memory = max(found.memory, highest() - before)


def mutated(cases: int, seed: int, root: Path) -> Found:
    """Random changes, several in each file, every second one beside the numbers of its tensor."""
    chance, found = random.Random(seed), Found()
    path, held = root / "mutated.zip", content(1)
    write_archive(path, held.documents, held.tensors)
    data = path.read_bytes()
    beside = beside_numbers(data, held)
    note(found, path_with(path, data[:-1]), lambda: True)  # what reading imports is imported
    found, events = Found(file=len(data)), watched()
    for case in track(range(cases), "mutated"):
        path.write_bytes(mutation(data, chance, beside if case % 2 else range(len(data))))
        note(found, path, lambda: True)
    found.code = len(events)
    return found


def path_with(path: Path, data: bytes) -> Path:
    """The file, with this in it."""
    path.write_bytes(data)
    return path


def watched() -> list[str]:
    """From now on, all events that run code."""
    events: list[str] = []
    sys.addaudithook(lambda event, _: events.append(event) if event in RUNS_CODE else None)
    return events


def mutation(data: bytes, chance: random.Random, places: Sequence[int]) -> bytes:
    """One to eight bytes at these places replaced, put in or taken out."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        place = chance.choice(places)
        changed[place : place + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 2))
    return bytes(changed) if bytes(changed) != data else flipped(data, 0, chance)


def resident() -> int:
    """Bytes that the process holds, from which `highest` counts anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def highest() -> int:
    """The most bytes that it held since."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
