"""Checkpoints with anything anywhere, under a right seal, as whoever knows the format can write them."""

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.hurt_files import Found, highest, resident, watched
from benchmarks.killed_runs import AGENTS, CLASSES
from rlxf.training import CheckpointError, read_archive, write_archive

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 10**5, 10**9, 2**63, 1e308, -0.5),
    *("", "x", "../../x", "__import__('os').system('true')", [], {}, [1, [2]], {"name": "os"}),
)
"""What is put there: numbers that are too large, and what is of another kind."""


def hostile(name: str, cases: int, seed: int, root: Path) -> Found:
    """Load so many of an agent's files: each is taken, or refused with a `CheckpointError`."""
    chance, found, path = random.Random(seed), Found(), root / f"{name}-hostile.zip"
    agent = AGENTS[name][0]()
    agent.save(path)
    archive = read_archive(path)
    documents, everywhere = archive.documents, list(leaves(archive.documents))
    CLASSES[name].load(path, device="cpu")  # what reading imports is imported
    found.file, events = path.stat().st_size, watched()
    for _ in track(range(cases), f"hostile {name}"):
        changed = put(documents, chance.choice(everywhere), chance.choice(VALUES))
        if writable(path, changed, archive.tensors):
            note_load(found, name, path)
    found.code = len(events)
    return found


def writable(path: Path, documents: Any, tensors: Any) -> bool:
    """Write it, if it is anything that can be."""
    try:
        write_archive(path, documents, tensors)
    except (TypeError, ValueError, AttributeError):
        return False
    return True


def note_load(found: Found, name: str, path: Path) -> None:
    """Load it, and count what came of it, how long it took, and how much memory."""
    found.cases += 1
    before, start = resident(), time.perf_counter()
    try:
        CLASSES[name].load(path, device="cpu")
        found.whole += 1
    except CheckpointError:
        found.refused += 1
    except Exception as error:
        print(f"{name}: {error!r}", file=sys.stderr)
        found.wrong += 1
    found.seconds = max(found.seconds, time.perf_counter() - start)
    found.memory = max(found.memory, highest() - before)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where all there is stands in documents."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from leaves(part, (*path, key))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The documents with another value there."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(copy[path[0]], path[1:], new)
    return copy
