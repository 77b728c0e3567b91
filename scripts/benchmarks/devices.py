"""Waits of the program for a simulated accelerator."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class Devices:
    """Number of times that agents and techniques wait for an accelerator, which is simulated on the CPU."""

    def run(self) -> None:
        """Print the counts; torch must not have been used in the process with the device."""
        subprocess.run([sys.executable, "-m", "tests.devices.counts"], cwd=ROOT, check=True)
