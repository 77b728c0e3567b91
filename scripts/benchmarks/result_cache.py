"""Runs of benchmarks: checks of their options, their cache as JSON lines of a file, their learning curves."""

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import fresh_processes, machine

Jobs = Mapping[str, Callable[[], Any]]
"""By key of a run: picklable function that makes it and returns a dataclass of JSON data."""

SOLVED = 0.95
"""Success rate from which a task counts as solved."""


def check_names(**chosen: tuple[Iterable[Any], Iterable[Any]]) -> None:
    """Raise ValueError if an option has names, the first of a pair, that are not among the second."""
    for option, (names, allowed) in chosen.items():
        known = [str(each) for each in allowed]
        if unknown := sorted({str(name) for name in names}.difference(known)):
            separator = "; " if any("," in each for each in known) else ", "
            raise ValueError(f"{option} must be among {separator.join(known)}, got {separator.join(unknown)}")


class SuccessCurve:
    """Base of the results of runs with periodic evaluations of their success."""

    curve: list[tuple[int, float]]
    """(environment steps, success rate) of each evaluation."""

    @property
    def solved_at(self) -> int | None:
        """Steps before the first evaluation with a success rate of at least 0.95; None if there is none."""
        return next((step for step, success in self.curve if success >= SOLVED), None)


def run_missing(jobs: Jobs, processes: int, output: Path) -> dict[str, dict[str, Any]]:
    """Make the runs that are missing in the output file, one thread each, and return all requested runs.

    A line is written after each run, so runs of several processes may be in another order than the jobs.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    done = read_runs(output)
    with fresh_processes(processes) as pool:
        running = {pool.submit(make): key for key, make in jobs.items() if key not in done}
        while running:
            wait(running, return_when=FIRST_COMPLETED)
            for job in [job for job in running if job.done()]:
                write_run(output, running.pop(job), job.result())
    return requested_runs(jobs, output)


def run_missing_here(jobs: Jobs, output: Path) -> dict[str, dict[str, Any]]:
    """Make the runs that are missing in the output file in this process, and return all requested runs.

    On a GPU this is faster than `run_missing`, whose processes each initialize it.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    done = read_runs(output)
    for key, make in jobs.items():
        if key not in done:
            write_run(output, key, make())
    return requested_runs(jobs, output)


def requested_runs(jobs: Jobs, output: Path) -> dict[str, dict[str, Any]]:
    """Return the runs of the output file with the keys of the jobs."""
    done = read_runs(output)
    return {key: done[key] for key in jobs}


def write_run(output: Path, key: str, run: Any) -> None:
    """Append a completed run to the output file, and print its key."""
    line = {"key": key, "machine": machine(), "run": asdict(run)}
    with open(output, "a") as file:
        file.write(json.dumps(line) + "\n")
    Console().print(f"done: {key}")


def read_runs(output: Path) -> dict[str, dict[str, Any]]:
    """Read the completed runs of the output file by key."""
    lines = map(json.loads, output.read_text().splitlines()) if output.exists() else ()
    return {line["key"]: line["run"] for line in lines}
