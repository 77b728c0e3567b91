"""Runs and files that are hurt on purpose, and what becomes of them."""

import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.broken_envs import BrokenEnvs, as_table
from benchmarks.hostile_files import hostile
from benchmarks.hurt_files import Found, altered, cut_while_written, mutated
from benchmarks.killed_commands import COMMANDS, KilledCommands, killed_commands
from benchmarks.killed_runs import AGENTS, SAVED, Killed, cost_of_saving, killed_runs
from benchmarks.random_settings import Drawn, random_settings

MOST_SAVING = 0.03
"""Of the training's time."""


@dataclass
class Faults:
    """Kill runs and writers, alter files, break environments, and count what is lost; measure what it costs.

    For Linux: runs are forked, so that a start takes no time, and memory is read from /proc.
    """

    kills: int = 100
    """SIGKILLs for the runs of each agent, at random moments."""
    operations: int = 67
    """Runs of each command that are killed at a file operation, spread over their whole life, each of those
    after the last checkpoint included."""
    operations_output: Path | None = None
    """JSON lines of these runs; None for none."""
    writes: int = 200
    """SIGKILLs for writers of a checkpoint, each behind a random byte."""
    alterations: int = 1000
    """Checkpoints with a byte flipped or cut off, in every region of the file."""
    mutations: int = 10_000
    """Files that are read after several random changes each, while what runs is watched."""
    hostile: int = 1000
    """Files of each agent with another value somewhere, under a right seal, that are loaded."""
    settings: int = 1000
    """Agents with settings drawn at random, half of them of each kind."""
    envs: BrokenEnvs = field(default_factory=BrokenEnvs)
    """Trainings in which one environment raises, is killed or hangs. The timeout alone bounds what the others
    pay for one that hangs."""
    seed: int = 0
    """Of all of it."""
    output: Path = Path("runs/bench-faults.json")
    """Where to write all numbers."""

    def run(self) -> None:
        """Print a table as each kind is done, and write all numbers.

        Raises:
            SystemExit: with 1 and what it was, if anything was lost, ran, or took too much.
        """
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            found = {
                "killed": self.killed(root),
                "commands": self.commands(root / "commands"),
                "files": self.files(root),
                "settings": self.drawn(),
            }
            found["environments"] = self.broken()
            costs = saving_costs(root)
        told = {kind: {name: asdict(each) for name, each in all_.items()} for kind, all_ in found.items()}
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(told | {"saving": costs}, indent=1))
        Console().print(f"numbers: {self.output}")
        missed = [f"{kind}, {what}" for kind, all_ in found.items() for what in failures(all_)]
        missed += [
            f"saving a {name}: {cost[1]:.2%}" for name, cost in costs.items() if cost[1] >= MOST_SAVING
        ]
        if missed:
            sys.exit("\n".join(missed))

    def killed(self, root: Path) -> dict[str, Any]:
        """Runs that are killed and resumed."""
        killed = {name: killed_runs(name, self.kills, self.seed, root) for name in AGENTS}
        show_killed(killed)
        return killed

    def commands(self, root: Path) -> dict[str, Any]:
        """Runs of commands that are killed at a chosen file operation, and resumed."""
        given = (self.operations, self.seed, root, self.operations_output)
        killed = {name: killed_commands(name, *given) for name in COMMANDS}
        show_commands(killed)
        return killed

    def files(self, root: Path) -> dict[str, Any]:
        """Files whose writer dies, that are altered, or that ask for what they should not."""
        files = {
            "written when killed": cut_while_written(self.writes, self.seed, root),
            "altered or cut": altered(self.alterations, self.seed, root),
            "mutated": mutated(self.mutations, self.seed, root),
        } | {f"hostile {name}": hostile(name, self.hostile, self.seed, root) for name in AGENTS}
        show_files(files)
        return files

    def drawn(self) -> dict[str, Any]:
        """Agents with any settings."""
        drawn = {name: random_settings(name, self.settings // 2, self.seed) for name in AGENTS}
        show_drawn(drawn)
        return drawn

    def broken(self) -> dict[str, Any]:
        """Environments of which one breaks again and again."""
        found = self.envs.found()
        Console().print(as_table(found))
        return found


def failures(found: dict[str, Any]) -> list[str]:
    """What was lost, ran, or took too much, by name."""
    return [f"{name}: {what}" for name, each in found.items() for what in each.missed()]


def saving_costs(root: Path) -> dict[str, tuple[float, float]]:
    """Seconds of the processor that a checkpoint takes, and their share of a minute."""
    costs = {name: cost_of_saving(make, root / name) for name, make in SAVED.items()}
    for name, (seconds, share) in costs.items():
        Console().print(f"saving a {name}: {1000 * seconds:.1f} ms, {share:.2%} at one a minute")
    return costs


def show_killed(killed: dict[str, Killed]) -> None:
    """A line for each agent."""
    table = Table("agent", "runs", "SIGKILLs", "resumed to the same bits", title="Killed at random moments")
    for name, each in killed.items():
        table.add_row(name, str(each.runs), str(each.kills), str(each.equal))
    Console().print(table)


def show_commands(killed: dict[str, KilledCommands]) -> None:
    """A line for each command."""
    heads = (
        "command",
        "file operations",
        "after the last checkpoint",
        "runs",
        "SIGKILLs",
        "other than alone",
    )
    table = Table(*heads, title="Killed at file operations")
    for name, each in killed.items():
        numbers = (each.operations, each.final, each.runs, each.kills, len(each.failures))
        table.add_row(name, *map(str, numbers))
    Console().print(table)


def show_files(files: dict[str, Found]) -> None:
    """A line for each kind of harm."""
    table = Table(
        "files",
        "cases",
        "refused",
        "taken",
        "wrong",
        "code run",
        "longest",
        "most memory",
        "file",
        title="Files",
    )
    for name, each in files.items():
        cells = (each.cases, each.refused, each.whole, each.wrong, each.code)
        table.add_row(
            name,
            *map(str, cells),
            f"{each.seconds:.2f} s",
            f"{each.memory / 1e6:.1f} MB",
            f"{each.file / 1e6:.1f} MB",
        )
    Console().print(table)


def show_drawn(drawn: dict[str, Drawn]) -> None:
    """A line for each agent."""
    table = Table("agent", "cases", "trained", "refused at once", "wrong", title="Settings drawn at random")
    for name, each in drawn.items():
        table.add_row(name, *map(str, asdict(each).values()))
    Console().print(table)
