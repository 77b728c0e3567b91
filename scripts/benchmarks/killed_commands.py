"""Fault injection for commands: killed at a chosen file operation, and resumed until complete."""

import csv
import json
import math
import os
import random
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from stable_baselines3.common.logger import CSVOutputFormat, TensorBoardOutputFormat
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

import rlxf
from rlxf.cli import main
from rlxf.data import ReferenceScores

DATASET = "kills/random-v0"
SCALE = ReferenceScores(0.0, 500.0, "the bounds of the task")
RUN = "--no-progress-bar --checkpoint-seconds 0"
CORE = f"--core.width 8 --core.layers 1 {RUN}"
WINDOWS = f"--dataset {DATASET} --log-interval 2 --context-length 4 --batch-size 4 --core.dropout 0.2 {CORE}"
PERCEPTRON = (
    f"--dataset {DATASET} --updates 5 --episodes 3 --evaluate-every 2 --log-interval 2 --context-length 2"
    f" --batch-size 4 --hidden-sizes 8 8 --dropout 0.2 {RUN}"
)
COMMANDS = {
    "train gtrxl": shlex.split(
        "train gtrxl --env CartPole-v1 --total-timesteps 128 --episodes 3 --evaluate-every 50 --n-envs 2"
        " --n-steps 16 --segment-length 8 --batch-size 16 --n-epochs 2 --memory-every 2"
        f" --normalize-observations --attention-maps-every None --core.memory.length 8 --no-videos {CORE}"
    ),
    "train dt": shlex.split(f"train dt --updates 5 --episodes 3 --evaluate-every 2 {WINDOWS}"),
    "train bc": shlex.split(f"train bc --best 0.5 {PERCEPTRON}"),
    "train rvs": shlex.split(f"train rvs {PERCEPTRON}"),
    "pretrain": shlex.split(f"pretrain --updates 5 --mask-probability 0.4 {WINDOWS}"),
}
"""Small runs of each resumable command."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
"""Audit events of operations that change files, in addition to "open"."""
LOGS = (CSVOutputFormat, TensorBoardOutputFormat)
TIME_PREFIX = "time/"


@dataclass
class Operations:
    """Counter of the file operations of a process in a run folder; kills the process at one of them.

    It must be installed in a process that was forked for one run, as an audit hook cannot be removed.

    Args:
        folder: folder of the run; other operations do not count.
        last: number of the operation at which the process is killed, from 1.
        names: operations so far.
    """

    folder: Path
    last: float = math.inf
    names: list[str] = field(default_factory=list)

    def install(self) -> None:
        """Start counting operations, each before it happens, and writes of log lines also afterwards."""
        sys.addaudithook(self._audit)
        sync = os.fsync

        def counted_sync(handle: int) -> None:
            self.count("fsync")
            sync(handle)

        os.fsync = counted_sync  # type: ignore[assignment]
        for kind in LOGS:
            kind.write = self._counted(kind.write, f"{kind.__name__}.write")  # type: ignore[method-assign]

    def count(self, name: str) -> None:
        """Count an operation, or kill the process before it."""
        self.names.append(name)
        if len(self.names) >= self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and (args[2] or 0) & WRITING):
            paths = [os.fsdecode(each) for each in args if isinstance(each, str | bytes | os.PathLike)]
            if any(self.folder.name in path for path in paths):
                self.count(" ".join([event, *(Path(path).name for path in paths)]))

    def _counted(self, write: Callable[..., None], name: str) -> Callable[..., None]:
        def counted(*args: Any) -> None:
            self.count(name)
            write(*args)
            self.count(f"after {name}")

        return counted


@dataclass
class KilledCommands:
    """Outcomes of killed runs of a command.

    Args:
        operations: number of file operations of a whole run.
        final: number of file operations after the last checkpoint of training.
        kills: SIGKILLs that ended a run.
        runs: runs that were killed and resumed until they were complete.
        failures: differences from an uninterrupted run, by the operation at which a run was killed.
    """

    operations: int = 0
    final: int = 0
    kills: int = 0
    runs: int = 0
    failures: dict[str, list[str]] = field(default_factory=dict)

    def missed(self) -> list[str]:
        """Return the violated expectations."""
        return [f"killed at {point}: {', '.join(each)}" for point, each in self.failures.items()]


def killed_commands(
    name: str, kills: int, seed: int, root: Path, output: Path | None = None, only_final: bool = False
) -> KilledCommands:
    """Kill runs of a command at operations spread over the whole run, including each of the final ones.

    Args:
        name: name of the command.
        kills: number of runs; each is killed once or twice.
        seed: random seed of the choice of operations.
        root: folder of all runs and data.
        output: file with a JSON line for each run; None: no output.
        only_final: omit operations before the last checkpoint of training.
    """
    prepare(root, name)
    uninterrupted, rng = root / f"{name}-alone", random.Random(seed)
    operations = operations_of(name, uninterrupted)
    first_final = max(
        i for i, each in enumerate(operations, 1) if each.startswith("os.rename") and "step-" in each
    )
    outcomes = KilledCommands(len(operations), len(operations) - first_final)
    start = first_final if only_final else 1
    for point in points(start, first_final, len(operations), kills, rng):
        folder = root / f"{name}-{point}"
        again = rng.randint(1, len(operations)) if rng.random() < 0.5 else math.inf
        start_time = time.monotonic()
        deaths, failures = run_to_completion(name, folder, [point, again])
        failures = failures or differences(uninterrupted, folder)
        outcomes.kills, outcomes.runs = outcomes.kills + deaths, outcomes.runs + 1
        if failures:
            outcomes.failures[f"{point} ({operations[point - 1]}), then {again}"] = failures
        line = {"command": name, "point": point, "operation": operations[point - 1], "of": len(operations)}
        line |= {"final": point >= first_final, "again": again if again < math.inf else None}
        note(output, line | {"kills": deaths, "failures": failures, "seconds": time.monotonic() - start_time})
    return outcomes


def prepare(root: Path, name: str) -> None:
    """Record data, and run the command once, so that forked processes have all modules loaded."""
    torch.set_num_threads(1)
    os.environ["MINARI_DATASETS_PATH"], os.environ["RLXF_CACHE"] = str(root / "minari"), str(root / "cache")
    if not (root / "minari" / "kills").exists():
        (root / "minari").mkdir(parents=True)
        rlxf.collect(None, "CartPole-v1", DATASET, 20, reference_scores=SCALE)
    quietly(COMMANDS[name], root / f"{name}-first")


def points(start: int, final: int, end: int, number: int, rng: random.Random) -> list[int]:
    """Choose numbers of operations: the final ones first, evenly spaced, then random others."""
    last, others = list(range(final, end + 1)), list(range(start, final))
    if number <= len(last):
        return sorted({last[round(i * (len(last) - 1) / max(1, number - 1))] for i in range(number)})
    return sorted(last + rng.sample(others, min(number - len(last), len(others))))


def operations_of(name: str, folder: Path) -> list[str]:
    """Return the file operations of an uninterrupted run."""
    output = folder.with_suffix(".operations")
    assert in_child(partial(work, name, folder, math.inf, output)) == 0
    return list(json.loads(output.read_text()))


def run_to_completion(name: str, folder: Path, deaths: Iterable[float]) -> tuple[int, list[str]]:
    """Run a command, killed at these operations, until it is complete; return kills and failures."""
    kills, ends = 0, iter(deaths)
    for _ in range(5):
        status = in_child(partial(work, name, folder, next(ends, math.inf)))
        kills += status == -signal.SIGKILL
        if status not in (0, -signal.SIGKILL):
            return kills, [f"ended with status {status}"]
        if status == 0:
            return kills, []
    return kills, ["did not complete"]


def work(name: str, folder: Path, last: float, output: Path | None = None) -> None:
    """Start a run, or resume it if it exists, and count its file operations."""
    operations = Operations(folder, last)
    operations.install()
    words = ["resume", str(folder), "--no-progress-bar"] if folder.exists() else COMMANDS[name]
    quietly(words, None if folder.exists() else folder)
    operations.count("end of the command")
    if output is not None:
        output.write_text(json.dumps(operations.names))


def quietly(words: list[str], folder: Path | None) -> None:
    """Run a command without its output to stdout."""
    with open(os.devnull, "w") as null:
        before, sys.stdout = sys.stdout, null
        try:
            main([*words, *([] if folder is None else ["--run", str(folder)])])
        finally:
            sys.stdout = before


def in_child(task: Callable[[], Any]) -> int:
    """Run a task in a forked process; return its exit status, or the negative signal that killed it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            task()
            status = 0
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def differences(one: Path, other: Path) -> list[str]:
    """Return the differences of two runs: files, rows of the log, points of TensorBoard."""
    files = ("checkpoint.zip", "normalizer.zip", "best.zip", "completed.json")
    outcomes = [name for name in files if contents(one / name) != contents(other / name)]
    outcomes += ["rows"] * (rows(one) != rows(other))
    return outcomes + ["points"] * (log(one) != log(other))


def contents(path: Path) -> bytes | None:
    """Return the content of a file; None if it does not exist."""
    return path.read_bytes() if path.is_file() else None


def rows(run: Path) -> list[dict[str, str]]:
    """Return the rows of the log of a run, without times."""
    with open(run / "progress.csv", newline="") as file:
        return [{key: x for key, x in row.items() if x and timeless(key)} for row in csv.DictReader(file)]


def log(folder: Path) -> dict[str, list[Any]]:
    """Return TensorBoard points by tag: steps and values of scalars, steps of images and histograms."""
    if not folder.is_dir():
        return {}
    events = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0, "images": 0}).Reload()
    tags = events.Tags()
    outcomes = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags["scalars"]}
    outcomes |= {tag: [each.step for each in events.Histograms(tag)] for tag in tags["histograms"]}
    outcomes |= {tag: [each.step for each in events.Images(tag)] for tag in tags["images"]}
    return {tag: each for tag, each in outcomes.items() if timeless(tag)}


def timeless(name: str) -> bool:
    """Return whether a logged value does not depend on time."""
    return name == f"{TIME_PREFIX}total_timesteps" or not name.startswith(TIME_PREFIX)


def note(output: Path | None, line: dict[str, Any]) -> None:
    """Append a JSON line to the output file."""
    if output is not None:
        with open(output, "a") as file:
            file.write(json.dumps(line) + "\n")
