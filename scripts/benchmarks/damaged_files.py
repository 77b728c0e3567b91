"""Fault injection for checkpoint files: killed writers, damaged and altered files."""

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
from benchmarks.process_memory import peak_bytes, resident_bytes
from rlxf.training import Archive, CheckpointError, CheckpointFolder, archive, read_archive, write_archive

NUMBERS = 1_000_000
RUNS_CODE = ("exec", "compile", "import", "os.system", "os.exec", "subprocess.Popen", "pickle.find_class")
MAX_BYTES = 2**24
MAX_SECONDS = 5.0
SPARE = 2**25
"""Bytes that Python and torch may use in addition to twice the size of the file."""


@dataclass
class FileOutcomes:
    """Outcomes of reading damaged files.

    Args:
        cases: number of files.
        refused: files that were rejected with a `CheckpointError` that names the file.
        whole: files that were read correctly.
        wrong: all other files: altered files that were read, or other errors.
        code: audit events of code execution during reading.
        seconds: maximum CPU time per file.
        memory: maximum bytes of memory per file.
        file: size of the undamaged file, in bytes.
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
        """Return the violated expectations that do not depend on the speed of the machine."""
        failures = {
            f"{self.wrong} of {self.cases} were accepted, or raised another error": self.wrong,
            f"code was run {self.code} times": self.code,
            f"one file took {self.memory:,} bytes for {self.file:,}": self.memory > 2 * self.file + SPARE,
        }
        return [message for message, failed in failures.items() if failed]

    def slow(self) -> list[str]:
        """Return the violated expectation of the time per file."""
        return [f"one file took {self.seconds:.1f} s"] if self.seconds > MAX_SECONDS else []


class KillingFile:
    """File handle that kills the process after ``remaining`` bytes."""

    def __init__(self, handle: BinaryIO, remaining: int):
        self._handle, self._remaining = handle, remaining

    def write(self, data: bytes) -> int:
        """Write data; at the limit, flush the last bytes and kill the process."""
        if len(data) < self._remaining:
            self._remaining -= len(data)
            return self._handle.write(data)
        self._handle.write(data[: self._remaining])
        self._handle.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def content(step: int) -> Archive:
    """Return the content of the checkpoint at a step; it differs from that of other steps."""
    generator = torch.Generator().manual_seed(step)
    return Archive({"agent": {"step": step}}, {"policy": {"w": torch.randn(NUMBERS, generator=generator)}})


def cut_while_written(cases: int, seed: int, root: Path) -> FileOutcomes:
    """Kill writers after a random byte; the newest valid checkpoint must be the previous one."""
    rng, outcomes, folder = random.Random(seed), FileOutcomes(), CheckpointFolder(root / "cut")
    folder.write(0, content(0))
    size = folder.file(0).stat().st_size
    for step in track(range(1, cases + 1), "killed while writing"):
        offset = rng.randrange(1, size)
        killed_after(math.inf, partial(write_and_die, folder, step, offset))
        outcomes.cases += 1
        outcomes.whole += newest_is_whole(folder)
        folder.write(step, content(step))
    outcomes.wrong = outcomes.cases - outcomes.whole
    return outcomes


def write_and_die(folder: CheckpointFolder, step: int, offset: int) -> None:
    """Write a checkpoint, and kill the process during the write."""
    original: Any = archive.atomic_write
    killed: Any = lambda path, write: original(path, lambda h: write(KillingFile(h, offset)))  # noqa: E731
    archive.atomic_write = killed
    folder.write(step, content(step))


def newest_is_whole(folder: CheckpointFolder) -> bool:
    """Return whether the newest valid checkpoint has the content that was saved."""
    read = read_archive(folder.newest())
    step = read.documents["agent"]["step"]
    return torch.equal(read.tensors["policy"]["w"], content(step).tensors["policy"]["w"])


def altered(cases: int, seed: int, root: Path) -> FileOutcomes:
    """Flip a bit or truncate the file; it must be rejected, and the previous checkpoint used.

    Three quarters of the cases flip bits outside of tensor data: the file has few of these bytes, so each is
    hit if there are enough cases. The remaining cases are flips and truncations spread over the whole file.
    """
    rng, outcomes, folder = random.Random(seed), FileOutcomes(), CheckpointFolder(root / "altered")
    folder.write(1, content(1))
    folder.write(2, content(2))
    newest = folder.file(2)
    data = newest.read_bytes()
    offsets, outcomes.file = metadata_offsets(data, content(2)), len(data)
    few = min(len(offsets), 3 * cases // 4)
    damages = [partial(flipped, data, offset, rng) for offset in evenly(offsets, few)]
    for case, offset in enumerate(evenly(range(len(data)), cases - few)):
        damages.append(partial(flipped, data, offset, rng) if case % 2 else partial(cut, data, offset))
    for damage in track(damages, "altered"):
        newest.write_bytes(damage())
        note(outcomes, newest, lambda: folder.newest() == folder.file(1))
    return outcomes


def metadata_offsets(data: bytes, archive_content: Archive) -> list[int]:
    """Return the offsets of all bytes outside of tensor data."""
    numbers = archive_content.tensors["policy"]["w"].numpy().tobytes()
    bulk = data.index(numbers)
    return [*range(bulk), *range(bulk + len(numbers), len(data))]


def evenly(offsets: Sequence[int], number: int) -> list[int]:
    """Select ``number`` evenly spaced elements, starting with the first."""
    return [offsets[k * len(offsets) // number] for k in range(number)]


def cut(data: bytes, offset: int) -> bytes:
    """Return the data truncated at an offset."""
    return data[:offset]


def flipped(data: bytes, offset: int, rng: random.Random) -> bytes:
    """Return the data with one flipped bit."""
    return data[:offset] + bytes([data[offset] ^ 1 << rng.randrange(8)]) + data[offset + 1 :]


def note(outcomes: FileOutcomes, path: Path, previous_is_used: Callable[[], bool]) -> None:
    """Read an altered file and record the outcome."""
    outcomes.cases += 1
    before, start = resident_bytes(), time.process_time()
    try:
        read_archive(path, MAX_BYTES)
        outcomes.wrong += 1
    except CheckpointError as error:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            right = str(path) in str(error) and previous_is_used()
        outcomes.refused += right
        outcomes.wrong += not right
    outcomes.seconds = max(outcomes.seconds, time.process_time() - start)
    outcomes.memory = max(outcomes.memory, peak_bytes() - before)


def mutated(cases: int, seed: int, root: Path) -> FileOutcomes:
    """Make several random changes in each file; in every second file outside of tensor data."""
    rng, outcomes = random.Random(seed), FileOutcomes()
    path, archive_content = root / "mutated.zip", content(1)
    write_archive(path, archive_content.documents, archive_content.tensors)
    data = path.read_bytes()
    metadata = metadata_offsets(data, archive_content)
    note(outcomes, path_with(path, data[:-1]), lambda: True)  # import everything that reading imports
    outcomes, events = FileOutcomes(file=len(data)), watched()
    for case in track(range(cases), "mutated"):
        path.write_bytes(mutation(data, rng, metadata if case % 2 else range(len(data))))
        note(outcomes, path, lambda: True)
    outcomes.code = len(events)
    return outcomes


def path_with(path: Path, data: bytes) -> Path:
    """Write data to a file and return its path."""
    path.write_bytes(data)
    return path


def watched() -> list[str]:
    """Return a list to which all later audit events of code execution are appended."""
    events: list[str] = []
    sys.addaudithook(lambda event, _: events.append(event) if event in RUNS_CODE else None)
    return events


def mutation(data: bytes, rng: random.Random, offsets: Sequence[int]) -> bytes:
    """Return data with one to eight random replacements, insertions or deletions at these offsets."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        offset = rng.choice(offsets)
        changed[offset : offset + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
    return bytes(changed) if bytes(changed) != data else flipped(data, 0, rng)
