"""Memory of a training on large data, in a process of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.machine import fresh_processes
from benchmarks.offline_setting import Setting
from rlxf import DecisionTransformer
from rlxf.envs.trajectories import load_trajectories

UPDATES = 100


@dataclass(frozen=True)
class Memory:
    """What a process that converted the data and trained on them took.

    Args:
        steps: of the data.
        file_bytes: of the arrays, memory-mapped.
        peak_bytes: most memory that the process held at a time, with all that Python and torch take and with
            those pages of the file that were read.
    """

    steps: int
    file_bytes: int
    peak_bytes: int


def memory_of_training(datasets: Sequence[str], setting: Setting) -> Memory:
    """Convert the datasets, joined, unless that was done before, and train for 100 updates."""
    with fresh_processes(1, torch.get_num_threads()) as pool:
        return pool.submit(_train, tuple(datasets), setting).result()


def _train(datasets: Sequence[str], setting: Setting) -> Memory:
    trajectories = load_trajectories(datasets)
    DecisionTransformer(trajectories, seed=0, **setting.arguments()).learn(UPDATES)
    arrays = (
        trajectories.observations,
        trajectories.actions,
        trajectories.rewards,
        trajectories.return_to_go,
    )
    return Memory(trajectories.steps, sum(array.nbytes for array in arrays), peak_bytes())


def peak_bytes() -> int:
    """Of this process, as Linux counts it; what the parent held is not in it."""
    status = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in status if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])
