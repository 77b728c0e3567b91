"""Worker process of `benchmarks.ranks`, started by torchrun: measures times and gradients."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from torch import nn

from benchmarks.offline_setting import SETTINGS
from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.data import Trajectories, return_to_go
from rlxf.training.distributed import init_process_group, process_group

EPISODES, LENGTH = 200, 200
"""Number and length of random episodes for the Decision Transformer."""


CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


class Phases(BaseCallback):
    """Callback that records the times of collecting and learning of each rollout."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock
        self.times: list[float] = []

    def _on_rollout_start(self) -> None:
        self.times.append(self.clock())

    def _on_rollout_end(self) -> None:
        self.times.append(self.clock())

    def _on_training_end(self) -> None:
        self.times.append(self.clock())

    def _on_step(self) -> bool:
        return True

    def median(self, phase: int) -> float:
        """Return the median seconds of collecting (0) or learning (1), without the first rollout."""
        return float(np.median(np.diff(self.times)[2 + phase :: 2]))


def online(folder: Path, rollouts: int) -> dict[str, dict[str, float]]:
    """Measure `GTrXLPPO` with default sizes on a T-Maze of 50; save the gradients of a full-batch update."""
    whole = GTrXLPPO("MlpGTrXLPolicy", "rlxf/TMaze-v0", n_epochs=1, batch_size=32 * 64, seed=0, device="cpu")
    keep_gradients(folder / "online.npz", whole.learn(32 * 64).policy)
    phases = {name: Phases(clock) for name, clock in CLOCKS.items()}
    agent = GTrXLPPO("MlpGTrXLPolicy", "rlxf/TMaze-v0", seed=0, device="cpu")
    agent.learn(rollouts * 32 * 64, [*phases.values()])
    return {
        "collecting": {name: each.median(0) for name, each in phases.items()},
        "learning": {name: each.median(1) for name, each in phases.items()},
    }


def offline(folder: Path, updates: int) -> dict[str, dict[str, float]]:
    """Measure `DecisionTransformer` with published sizes on random data with the shapes of Hopper."""
    settings = SETTINGS["published"].arguments() | {"seed": 0, "device": "cpu"}
    quiet = settings | {"core": replace(settings["core"], dropout=0.0)}  # ranks have different dropout masks
    keep_gradients(folder / "offline.npz", DecisionTransformer(some_data(), **quiet).learn(1).policy)
    agent = DecisionTransformer(some_data(), **settings).learn(2)
    before = {name: clock() for name, clock in CLOCKS.items()}
    agent.learn(updates)
    return {"update": {name: (clock() - before[name]) / updates for name, clock in CLOCKS.items()}}


def longest(results: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the seconds of the slowest rank for each phase and clock."""
    return {
        phase: {
            name: float(process_group().all_gather(torch.tensor([each])).max())
            for name, each in clocks.items()
        }
        for phase, clocks in results.items()
    }


def keep_gradients(path: Path, module: nn.Module) -> None:
    """Save the gradients of the last update, which are equal on all ranks."""
    results: Any = {name: x.grad.numpy() for name, x in module.named_parameters() if x.grad is not None}
    if process_group().is_main:
        np.savez(path, **results)


def some_data() -> Trajectories:
    """Return random trajectories with the shapes of Hopper."""
    rng, steps = np.random.default_rng(0), EPISODES * LENGTH
    rewards = rng.normal(size=(EPISODES, LENGTH)).astype(np.float32)
    return Trajectories(
        observations=rng.normal(size=(steps, 11)).astype(np.float32),
        actions=rng.uniform(-1, 1, (steps, 3)).astype(np.float32),
        rewards=rewards.ravel(),
        return_to_go=np.concatenate([return_to_go(episode) for episode in rewards]).astype(np.float32),
        offsets=np.arange(0, steps + 1, LENGTH),
        terminated=np.ones(EPISODES, bool),
        truncated=np.zeros(EPISODES, bool),
        observation_mean=np.zeros(11, np.float32),
        observation_std=np.ones(11, np.float32),
        observation_space=spaces.Box(-np.inf, np.inf, (11,), np.float32),
        action_space=spaces.Box(-1.0, 1.0, (3,), np.float32),
        dataset_ids=("benchmark/random-v0",),
    )


def main(folder: Path, rollouts: int, updates: int) -> None:
    """Run all measurements and write the results to the folder."""
    torch.set_num_threads(1)
    init_process_group()
    results = longest(online(folder, rollouts) | offline(folder, updates))
    if process_group().is_main:
        (folder / "found.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
