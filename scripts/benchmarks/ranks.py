"""What several processes gain, and that they learn what one does."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine

PHASES = {
    "collecting": "GTrXLPPO: collect a rollout",
    "learning": "GTrXLPPO: learn from it",
    "update": "DecisionTransformer: an update",
}
Found = dict[str, dict[str, float]]
"""Seconds by phase and clock."""


@dataclass
class Ranks:
    """Seconds of one and of several processes of one thread each, and how far their gradients are apart.

    The total batch is the same: of a GTrXLPPO at its default sizes, and of a Decision Transformer at the
    published ones. Start it where as many cores are free.
    """

    counts: tuple[int, ...] = (1, 2)
    """Of processes; the first is what the others are compared with."""
    rollouts: int = 6
    """Of the GTrXLPPO; the first is not timed."""
    updates: int = 30
    """Of the Decision Transformer."""
    out: Path | None = None
    """Where all numbers go as JSON; None for nowhere."""

    def run(self) -> None:
        """Measure and print."""
        with tempfile.TemporaryDirectory() as folder:
            found = {count: self._measured(count, Path(folder, str(count))) for count in self.counts}
            apart = {count: self._apart(Path(folder), count) for count in self.counts[1:]}
        Console().print(self._table(found))
        Console().print(
            "processor: seconds that the busiest process computed; others on the machine slow it less"
        )
        for count, differences in apart.items():
            Console().print(f"largest difference of a gradient, {count} processes: {differences}")
        if self.out is not None:
            report = {"machine": machine(), "seconds": found, "apart": apart}
            self.out.write_text(json.dumps(report, indent=2))

    def _measured(self, count: int, folder: Path) -> Found:
        folder.mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "-m"]
        worker = ["benchmarks.one_rank", str(folder), str(self.rollouts), str(self.updates)]
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        subprocess.run([*torchrun, *worker], env=env, check=True)
        found: Found = json.loads((folder / "found.json").read_text())
        return found

    def _apart(self, folder: Path, count: int) -> dict[str, float]:
        """Largest difference of a number of the gradients to those of the first count."""
        differences = {}
        for name in ("online", "offline"):
            one, other = (np.load(folder / str(n) / f"{name}.npz") for n in (self.counts[0], count))
            differences[name] = max(float(np.abs(one[key] - other[key]).max()) for key in one.files)
        return differences

    def _table(self, found: dict[int, Found]) -> Table:
        counted = [f"{count} processes" for count in self.counts]
        table = Table("milliseconds", "clock", *counted, "times as fast")
        for phase, clock in product(PHASES, ("wall", "processor")):
            took = [found[count][phase][clock] for count in self.counts]
            milliseconds = [f"{1000 * each:,.0f}" for each in took]
            table.add_row(PHASES[phase], clock, *milliseconds, f"{took[0] / took[-1]:.2f}")
        return table
