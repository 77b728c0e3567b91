"""Fault injection: killed runs, damaged files, random settings and failing environments."""

import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.broken_envs import BrokenEnvs, as_table
from benchmarks.damaged_files import FileOutcomes, altered, cut_while_written, mutated
from benchmarks.hostile_files import hostile
from benchmarks.killed_commands import COMMANDS, KilledCommands, killed_commands
from benchmarks.killed_runs import AGENTS, SAVED, KilledRuns, cost_of_saving, killed_runs
from benchmarks.random_settings import SettingsOutcomes, random_settings

MAX_SAVING = 0.03
"""Maximum share of training time for saving checkpoints."""


@dataclass
class Faults:
    """Kill runs and writers, damage files and break environments; count failures and measure the cost.

    This benchmark requires Linux: runs are forked for fast starts, and memory is read from /proc.
    """

    kills: int = 100
    """Number of SIGKILLs at random moments, per agent."""
    operations: int = 67
    """Runs of each command that are killed at a file operation. The operations are spread over the whole run
    and include all of those after the last checkpoint."""
    operations_output: Path | None = None
    """Output file with a JSON line for each of these runs; None: no output."""
    writes: int = 200
    """Number of SIGKILLs during the write of a checkpoint, each after a random byte."""
    alterations: int = 1000
    """Number of checkpoints with a flipped bit or a truncation, in all regions of the file."""
    mutations: int = 10_000
    """Number of files with several random changes that are read under an audit hook."""
    hostile: int = 1000
    """Number of loaded files per agent with a modified value and a valid seal."""
    settings: int = 1000
    """Number of agents with random settings, half of them of each kind."""
    envs: BrokenEnvs = field(default_factory=BrokenEnvs)
    """Training while one environment raises, is killed or hangs. The timeout limits the cost of a hang for
    the other environments."""
    seed: int = 0
    """Random seed."""
    output: Path = Path("runs/bench-faults.json")
    """Output file."""

    def run(self) -> None:
        """Run all tests, print their tables, and write all numbers.

        Raises:
            SystemExit: with status 1 and a list of the failures, if there are any.
        """
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            results = {
                "killed": self.killed(root),
                "commands": self.commands(root / "commands"),
                "files": self.files(root),
                "settings": self.drawn(),
            }
            results["environments"] = self.broken()
            costs = saving_costs(root)
        data = {kind: {name: asdict(each) for name, each in all_.items()} for kind, all_ in results.items()}
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(data | {"saving": costs}, indent=1))
        Console().print(f"numbers: {self.output}")
        messages = [f"{kind}, {message}" for kind, all_ in results.items() for message in failures(all_)]
        messages += [f"{name}: {text}" for name, each in results["files"].items() for text in each.slow()]
        messages += [
            f"saving a {name}: {cost[1]:.2%}" for name, cost in costs.items() if cost[1] >= MAX_SAVING
        ]
        if messages:
            sys.exit("\n".join(messages))

    def killed(self, root: Path) -> dict[str, Any]:
        """Kill and resume runs."""
        killed = {name: killed_runs(name, self.kills, self.seed, root) for name in AGENTS}
        show_killed(killed)
        return killed

    def commands(self, root: Path) -> dict[str, Any]:
        """Kill runs of commands at chosen file operations, and resume them."""
        args = (self.operations, self.seed, root, self.operations_output)
        killed = {name: killed_commands(name, *args) for name in COMMANDS}
        show_commands(killed)
        return killed

    def files(self, root: Path) -> dict[str, Any]:
        """Read files with a killed writer, with damage, and with malicious content."""
        files = {
            "written when killed": cut_while_written(self.writes, self.seed, root),
            "altered or cut": altered(self.alterations, self.seed, root),
            "mutated": mutated(self.mutations, self.seed, root),
        } | {f"hostile {name}": hostile(name, self.hostile, self.seed, root) for name in AGENTS}
        show_files(files)
        return files

    def drawn(self) -> dict[str, Any]:
        """Train agents with random settings."""
        drawn = {name: random_settings(name, self.settings // 2, self.seed) for name in AGENTS}
        show_drawn(drawn)
        return drawn

    def broken(self) -> dict[str, Any]:
        """Train while one environment fails repeatedly."""
        results = self.envs.found()
        Console().print(as_table(results))
        return results


def failures(results: dict[str, Any]) -> list[str]:
    """Return the violated expectations of all results, with their names."""
    return [f"{name}: {message}" for name, each in results.items() for message in each.missed()]


def saving_costs(root: Path) -> dict[str, tuple[float, float]]:
    """Return the CPU seconds of saving a checkpoint, and their share of a minute."""
    costs = {name: cost_of_saving(make, root / name) for name, make in SAVED.items()}
    for name, (seconds, share) in costs.items():
        Console().print(f"saving a {name}: {1000 * seconds:.1f} ms, {share:.2%} with one per minute")
    return costs


def show_killed(killed: dict[str, KilledRuns]) -> None:
    """Print a table with a row for each agent."""
    table = Table("agent", "runs", "SIGKILLs", "resumed bit-exactly", title="Killed at random moments")
    for name, each in killed.items():
        table.add_row(name, str(each.runs), str(each.kills), str(each.equal))
    Console().print(table)


def show_commands(killed: dict[str, KilledCommands]) -> None:
    """Print a table with a row for each command."""
    heads = (
        "command",
        "file operations",
        "after the last checkpoint",
        "runs",
        "SIGKILLs",
        "other than uninterrupted",
    )
    table = Table(*heads, title="Killed at file operations")
    for name, each in killed.items():
        numbers = (each.operations, each.final, each.runs, each.kills, len(each.failures))
        table.add_row(name, *map(str, numbers))
    Console().print(table)


def show_files(files: dict[str, FileOutcomes]) -> None:
    """Print a table with a row for each kind of damage."""
    table = Table(
        "files",
        "cases",
        "rejected",
        "read",
        "wrong",
        "code run",
        "maximum CPU time",
        "maximum memory",
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


def show_drawn(drawn: dict[str, SettingsOutcomes]) -> None:
    """Print a table with a row for each agent."""
    table = Table("agent", "cases", "trained", "rejected at once", "wrong", title="Random settings")
    for name, each in drawn.items():
        table.add_row(name, *map(str, asdict(each).values()))
    Console().print(table)
