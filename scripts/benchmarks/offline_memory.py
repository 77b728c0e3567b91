"""Memory of training on large datasets, measured in a new process."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.machine import fresh_processes
from benchmarks.offline_setting import Setting
from benchmarks.process_memory import peak_bytes
from rlxf import DecisionTransformer
from rlxf.data import load_trajectories

UPDATES = 100


@dataclass(frozen=True)
class Memory:
    """Memory of a process that converts the data and trains on them.

    Args:
        steps: number of steps of the data.
        file_bytes: bytes of the memory-mapped arrays.
        peak_bytes: peak resident memory of the process, including Python, torch and mapped pages of the
            arrays.
    """

    steps: int
    file_bytes: int
    peak_bytes: int


def memory_of_training(datasets: Sequence[str], setting: Setting) -> Memory:
    """Convert the joined datasets unless they are cached, and train for 100 updates."""
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
