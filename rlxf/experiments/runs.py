"""Runs below folders: their task, their settings and their seed."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from rlxf.experiments.columns import listed
from rlxf.experiments.log_files import open_logs
from rlxf.training.completion import Completion
from rlxf.training.strict_json import load_json_object
from rlxf.utils.files import check_no_links
from rlxf.utils.run_files import CHECKPOINT, CHECKPOINT_FOLDER, COMPLETED, CONFIG, TEACHER, checkpoint_files
from rlxf.utils.tables import printable
from rlxf.utils.warnings import warn_user

TASK_KEYS = ("env", "env_kwargs", "dataset")
"""Settings that define the task."""
IGNORED = {
    *TASK_KEYS,
    *("seed", "validation_seed", "run", "program", "trust_data", "track", "baselines"),
    *("device", "workers", "env_timeout", "env_restarts", "checkpoint_seconds", "log_interval"),
    *("episodes", "evaluate_every", "evaluation_episodes"),
    *("attention_maps", "attention_maps_every", "memory_every", "histograms_every", "videos"),
}
"""Settings in which runs of one group may differ: seeds, and settings that do not affect the updates."""
MAX_CONFIG_BYTES = 2**18
"""Largest size of a ``config.json``; all of those that are compared are in memory."""
TASK_CHARACTERS = 120
"""Maximum length of the name of a task."""
AGENT = "agent"
"""Setting with the name of the agent; of logs without settings, the name of their folder or file."""
SEED_SUFFIX = re.compile(r"(?:^|[-_ ])(?:seed|run)?[-_ ]?\d+$|seed\d+$", re.IGNORECASE)
"""End of the name of a folder or file that differs between seeds: ``-0``, ``_1``, ``seed2``, ``-seed-3``."""


@dataclass(frozen=True)
class Run:
    """A training with logs.

    Args:
        path: its folder or log file.
        task: environment or datasets with their arguments; "" if unknown.
        settings: values of the settings by name, without those of `IGNORED`, e.g. "core.width": 64.
        seed: seed of the training; None if unknown.
        unit: unit of the steps.
        finished: whether the training ended; None if unknown.
        ended_early: whether it ended before its last step, because an evaluation reached ``stop_return``.
    """

    path: Path
    task: str
    settings: Mapping[str, Any]
    seed: int | None = None
    unit: str = "steps"
    finished: bool | None = None
    ended_early: bool = False


def find_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Return the runs in these folders and files, in the given order; those in one folder sorted by name.

    A folder with a ``config.json`` or a log is one run. Folders without a ``config.json`` are searched with
    their subfolders, also those that have a log.
    Symbolic links to folders are not followed. A run that is found twice counts once. CSV files other than
    ``progress.csv`` and ``*monitor.csv`` are read only if their path is given.

    Args:
        paths: folders and log files.

    Raises:
        FileNotFoundError: if a path does not exist, or a folder contains no run.
        ValueError: if a file is not a log, a ``config.json`` is damaged or too large, or a folder with one
            contains a symbolic link.
        OSError: if a file cannot be read.

    Warns:
        UserWarning: if a run is found twice, or in a folder that has a log of its own.
    """
    runs: dict[Path, Run] = {}
    for path in map(Path, paths):
        for found in _run_paths(path):
            key = found.resolve()
            if key in runs:
                warn_user(f"{found} is given twice, and counts once")
            else:
                runs[key] = _read_run(found)
    return list(runs.values())


def _run_paths(path: Path) -> list[Path]:
    if not path.exists():
        raise FileNotFoundError(f"there is no run {path}; check the path")
    if path.is_file():
        open_logs(path)  # raises for other files
        return [path]
    found = list(_search(path))
    if not found:
        raise FileNotFoundError(
            f"{path} contains no run: no folder in it has a {CONFIG}, progress.csv, monitor.csv or "
            f"evaluations.npz"
        )
    _warn_of_nested(found)
    return found


def _warn_of_nested(found: Sequence[Path]) -> None:
    """Warn of folders that have logs, and runs below them."""
    parents = {parent for path in found for parent in path.parents}
    for folder in filter(parents.__contains__, found):
        nested = [str(path) for path in found if folder in path.parents]
        warn_user(
            f"{folder} has a log and runs below it ({listed(nested, 3)}), and counts as a run, too; if the "
            f"log is none of a training, move it, or give the folders of the runs"
        )


def _search(path: Path) -> Iterator[Path]:
    for folder, names, _ in os.walk(path):
        names.sort()
        if (Path(folder) / CONFIG).is_file():
            names.clear()
        if is_run(Path(folder)):
            yield Path(folder)


def is_run(folder: Path) -> bool:
    """Return whether a folder has a ``config.json`` or logs."""
    return (folder / CONFIG).is_file() or bool(open_logs(folder))


def _read_run(path: Path) -> Run:
    file = path / CONFIG
    if not file.is_file():
        logs = open_logs(path)
        task = next(filter(None, (log.task for log in logs)), "")
        return Run(path, _one_line(task), {AGENT: group_name(path)}, unit=logs[0].unit)
    check_no_links(path)
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{file} has more than {MAX_CONFIG_BYTES:,} bytes, so it was not made by rlxf")
    return _run_of_config(path, load_json_object(file, "restore it"))


def _run_of_config(path: Path, config: Mapping[str, Any]) -> Run:
    completion = Completion.read_marker(path)
    return Run(
        path,
        task_of(config),
        settings_of(config),
        seed if type(seed := config.get("seed")) is int else None,
        unit_of(config),
        _has_ended(path, config),
        completion is not None and completion.ended_early,
    )


def _has_ended(path: Path, config: Mapping[str, Any]) -> bool:
    """Return whether a training ended; an interrupted one has checkpoints to resume, and no marker."""
    if (path / COMPLETED).is_file():
        return True
    is_student = TEACHER in config  # a distillation has no checkpoints to resume, but a marker
    return (path / CHECKPOINT).is_file() and not is_student and not checkpoint_files(path / CHECKPOINT_FOLDER)


def unit_of(config: Mapping[str, Any]) -> str:
    """Return the unit of the steps of a training with these options: updates, if it is offline."""
    return "updates" if "updates" in config or "dataset" in config else "environment steps"


def task_of(config: Mapping[str, Any]) -> str:
    """Return the task in a ``config.json``: the datasets, or the environment with its arguments.

    ``{"env": "rlxf/TMaze-v0", "env_kwargs": {"corridor_length": 9}}`` is "rlxf/TMaze-v0, corridor_length=9".
    """
    dataset, kwargs = config.get("dataset"), config.get("env_kwargs")
    if isinstance(dataset, list) and dataset:
        return _one_line(" + ".join(map(str, dataset)))
    arguments = sorted(kwargs.items()) if isinstance(kwargs, dict) else []
    return _one_line(
        ", ".join([str(config.get("env") or ""), *(f"{name}={value}" for name, value in arguments)])
    )


def _one_line(task: str) -> str:
    """Return the name of a task without control characters. The end of a long name is its checksum."""
    text = " ".join(printable(task).split())
    return (
        text if len(text) <= TASK_CHARACTERS else f"{text[: TASK_CHARACTERS - 9]} {crc32(text.encode()):08x}"
    )


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that define a group of runs, as flat names with values.

    A nested object becomes names with dots. The name of a technique is the value of the object itself:
    ``{"core": {"memory": {"name": "XL", "length": 8}}}`` gives core.memory=XL and core.memory.length=8. A
    list becomes its text, which takes less memory.

    The environment of a run on datasets is among them, because its evaluations may be in another one than
    those of other runs on the datasets.

    Args:
        config: content of a ``config.json``.
    """
    ignored = IGNORED - {"env", "env_kwargs"} if config.get("dataset") else IGNORED
    return dict(_flat("", {key: value for key, value in config.items() if key not in ignored}))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield prefix, json.dumps(value) if isinstance(value, list) else value
        return
    for key, item in value.items():
        is_name = key == "name" and prefix
        yield from _flat(prefix if is_name else f"{prefix}.{key}".removeprefix("."), item)


def group_name(path: Path) -> str:
    """Return the name of the group of a log without settings: its path without the seed.

    The last two parts of the path count, without numbers such as ``-0``, ``_1`` or ``seed2`` at their end:
    logs/ppo/CartPole-v1_1 and logs/ppo/CartPole-v1_2 are ppo/CartPole-v1, and results/seed0.csv is results.
    """
    path = path.resolve()
    name = re.sub(r"\.?(?:monitor|progress)$", "", path.stem) if path.is_file() else path.name
    parts = [SEED_SUFFIX.sub("", part) for part in (path.parent.name, name)]
    return "/".join(filter(None, parts)) or path.name
