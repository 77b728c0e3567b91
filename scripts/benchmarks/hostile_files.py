"""Fuzzing of checkpoints with arbitrary JSON values and a valid seal, as an attacker can write them."""

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from benchmarks.damaged_files import FileOutcomes, watched
from benchmarks.killed_runs import AGENTS, CLASSES
from benchmarks.process_memory import peak_bytes, resident_bytes
from rlxf.training import CheckpointError, read_archive, write_archive

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 10**5, 10**9, 2**63, 1e308, -0.5),
    *("", "x", "../../x", "__import__('os').system('true')", [], {}, [1, [2]], {"name": "os"}),
)
"""Inserted values: numbers that are too large, and values of other types."""


def hostile(name: str, cases: int, seed: int, root: Path) -> FileOutcomes:
    """Load ``cases`` modified files of an agent; each must be loaded or rejected with a `CheckpointError`."""
    rng, outcomes, path = random.Random(seed), FileOutcomes(), root / f"{name}-hostile.zip"
    agent = AGENTS[name][0]()
    agent.save(path)
    archive = read_archive(path)
    documents, paths = archive.documents, list(leaves(archive.documents))
    import_modules(name, path)
    outcomes.file, events = path.stat().st_size, watched()
    for _ in track(range(cases), f"hostile {name}"):
        changed = put(documents, rng.choice(paths), rng.choice(VALUES))
        if writable(path, changed, archive.tensors):
            note_load(outcomes, name, path)
    outcomes.code = len(events)
    return outcomes


def import_modules(name: str, path: Path) -> None:
    """Import everything that loading, optimizers and progress bars import on first use."""
    CLASSES[name].load(path, device="cpu")
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
    list(track(range(1), "import modules"))


def writable(path: Path, documents: Any, tensors: Any) -> bool:
    """Write a checkpoint; return whether its content can be written."""
    try:
        write_archive(path, documents, tensors)
    except (TypeError, ValueError, AttributeError):
        return False
    return True


def note_load(outcomes: FileOutcomes, name: str, path: Path) -> None:
    """Load a checkpoint, and record the outcome, the time and the memory."""
    outcomes.cases += 1
    before, start = resident_bytes(), time.process_time()
    try:
        CLASSES[name].load(path, device="cpu")
        outcomes.whole += 1
    except CheckpointError:
        outcomes.refused += 1
    except Exception as error:
        print(f"{name}: {error!r}", file=sys.stderr)
        outcomes.wrong += 1
    outcomes.seconds = max(outcomes.seconds, time.process_time() - start)
    outcomes.memory = max(outcomes.memory, peak_bytes() - before)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in nested JSON documents."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from leaves(part, (*path, key))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of nested JSON documents with another value at a path."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(copy[path[0]], path[1:], new)
    return copy
