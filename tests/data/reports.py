"""Small trajectories in memory for tests of statistics, reports and findings."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike

from rlxf.data import DatasetReport, Trajectories, return_to_go
from tests.datasets import CHOICE, VECTOR

SPACES = {
    "Box": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "Box of two axes": spaces.Box(-np.inf, np.inf, (2, 3), np.float32),
    "Discrete": spaces.Discrete(4, start=-1),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3], start=[5, 0]),
    "MultiBinary": spaces.MultiBinary(3),
}


def trajectories(
    rewards: Sequence[ArrayLike],
    actions: ArrayLike | None = None,
    action_space: spaces.Space[Any] = CHOICE,
    **changes: Any,
) -> Trajectories:
    """Return episodes with these rewards; all are terminated, and their actions alternate."""
    lengths = [len(np.atleast_1d(each)) for each in rewards]
    steps = sum(lengths)
    fields = {
        "observations": np.zeros((steps, 3), np.float32),
        "actions": np.arange(steps) % 2 if actions is None else np.asarray(actions),
        "rewards": np.concatenate([np.asarray(each, np.float32) for each in rewards]),
        "return_to_go": np.concatenate([return_to_go(each) for each in rewards]).astype(np.float32),
        "offsets": np.cumsum([0, *lengths]),
        "terminated": np.ones(len(rewards), bool),
        "truncated": np.zeros(len(rewards), bool),
        "observation_mean": np.zeros(3, np.float32),
        "observation_std": np.ones(3, np.float32),
        "observation_space": VECTOR,
        "action_space": action_space,
        "dataset_ids": ("test/small-v0",),
    }
    return Trajectories(**fields | changes)  # type: ignore[arg-type]


def report(*args: Any, **changes: Any) -> DatasetReport:
    """Return the report of `trajectories` with these arguments."""
    return DatasetReport.of(trajectories(*args, **changes))


def varied(episodes: int = 12) -> list[np.ndarray]:
    """Return rewards of episodes without findings, except the missing environment."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=3 + number % 4) for number in range(episodes)]
