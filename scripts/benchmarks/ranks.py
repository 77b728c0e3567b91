"""Speedup and gradient accuracy of distributed training."""

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
    """Time of one and of several processes with one thread each, and differences of their gradients.

    The total batch is the same. GTrXLPPO has its default sizes, the Decision Transformer the published ones.
    The benchmark requires a free core for each process.
    """

    counts: tuple[int, ...] = (1, 2)
    """Numbers of processes; the first is the reference."""
    rollouts: int = 6
    """Rollouts of GTrXLPPO; the first is not timed."""
    updates: int = 30
    """Timed updates of the Decision Transformer."""
    out: Path | None = None
    """JSON output file; None: no output."""

    def run(self) -> None:
        """Measure, print the tables, and write the numbers."""
        with tempfile.TemporaryDirectory() as folder:
            results = {count: self._measured(count, Path(folder, str(count))) for count in self.counts}
            differences = {count: self._apart(Path(folder), count) for count in self.counts[1:]}
        Console().print(self._table(results))
        Console().print(
            "processor: CPU time of the slowest rank, which other programs on the machine affect less"
        )
        for count, largest in differences.items():
            Console().print(f"largest difference of a gradient, {count} processes: {largest}")
        if self.out is not None:
            report = {"machine": machine(), "seconds": results, "apart": differences}
            self.out.write_text(json.dumps(report, indent=2))

    def _measured(self, count: int, folder: Path) -> Found:
        folder.mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "-m"]
        worker = ["benchmarks.one_rank", str(folder), str(self.rollouts), str(self.updates)]
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        subprocess.run([*torchrun, *worker], env=env, check=True)
        results: Found = json.loads((folder / "found.json").read_text())
        return results

    def _apart(self, folder: Path, count: int) -> dict[str, float]:
        """Return the largest difference of gradients to those of the first number of processes."""
        differences = {}
        for name in ("online", "offline"):
            one, other = (np.load(folder / str(n) / f"{name}.npz") for n in (self.counts[0], count))
            differences[name] = max(float(np.abs(one[key] - other[key]).max()) for key in one.files)
        return differences

    def _table(self, results: dict[int, Found]) -> Table:
        counted = [f"{count} processes" for count in self.counts]
        table = Table("milliseconds", "clock", *counted, "speedup")
        for phase, clock in product(PHASES, ("wall", "processor")):
            seconds = [results[count][phase][clock] for count in self.counts]
            milliseconds = [f"{1000 * each:,.0f}" for each in seconds]
            table.add_row(PHASES[phase], clock, *milliseconds, f"{seconds[0] / seconds[-1]:.2f}")
        return table
