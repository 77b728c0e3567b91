"""Small Minari datasets for tests.

Tests need the fixture ``minari_root`` (tests/conftest.py), which sets temporary folders.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import minari
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from minari.data_collector import EpisodeBuffer

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
CHOICE = spaces.Discrete(2)
ID = "test/small-v0"


def stacked(space: spaces.Space, values: Sequence[Any]) -> Any:
    """Stack values of a space to arrays (n, ...), nested like the space."""
    return concatenate(space, values, create_empty_array(space, len(values)))


def random_episodes(
    lengths: Sequence[int],
    observation_space: spaces.Space = VECTOR,
    action_space: spaces.Space = CHOICE,
    seed: int = 0,
) -> list[EpisodeBuffer]:
    """Return episodes of these lengths with random content; every second one is truncated."""
    observation_space.seed(seed)
    action_space.seed(seed)
    rng = np.random.default_rng(seed)
    return [
        EpisodeBuffer(
            observations=_with_lists_of_text(
                stacked(observation_space, [observation_space.sample() for _ in range(length + 1)])
            ),
            actions=stacked(action_space, [action_space.sample() for _ in range(length)]),
            rewards=rng.normal(size=length),
            terminations=np.arange(length) == (length - 1 if number % 2 == 0 else -1),
            truncations=np.arange(length) == (length - 1 if number % 2 else -1),
        )
        for number, length in enumerate(lengths)
    ]


def _with_lists_of_text(values: Any) -> Any:
    """Convert tuples of strings to lists: Gymnasium batches text as tuples, Minari needs lists."""
    if isinstance(values, dict):
        return {key: _with_lists_of_text(part) for key, part in values.items()}
    if not isinstance(values, tuple):
        return values
    return list(values) if isinstance(values[0], str) else tuple(map(_with_lists_of_text, values))


def record(
    episodes: list[EpisodeBuffer],
    dataset_id: str = ID,
    observation_space: spaces.Space = VECTOR,
    action_space: spaces.Space = CHOICE,
    **options: Any,
) -> minari.MinariDataset:
    """Record episodes as a Minari dataset; ``options`` are those of ``create_dataset_from_buffers``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of missing author, description and so on
        return minari.create_dataset_from_buffers(
            dataset_id, episodes, observation_space=observation_space, action_space=action_space, **options
        )


def record_random(
    lengths: Sequence[int] = (3, 1, 5),
    dataset_id: str = ID,
    observation_space: spaces.Space = VECTOR,
    action_space: spaces.Space = CHOICE,
    seed: int = 0,
    **options: Any,
) -> minari.MinariDataset:
    """Record `random_episodes` with `record`."""
    episodes = random_episodes(lengths, observation_space, action_space, seed)
    return record(episodes, dataset_id, observation_space, action_space, **options)


def record_cartpole(
    lengths: Sequence[int] = (9, 3, 12, 1), dataset_id: str = ID, seed: int = 0, **options: Any
) -> minari.MinariDataset:
    """Record random numbers within the bounds of CartPole-v1, with its spec; options as in `record`."""
    env = gymnasium.make("CartPole-v1")
    bounds = np.array([4.8, 5, 0.4, 5], np.float32)
    episodes = random_episodes(lengths, spaces.Box(-bounds, bounds), env.action_space, seed)
    return record(episodes, dataset_id, env.observation_space, env.action_space, env=env, **options)


def data_file(dataset: minari.MinariDataset) -> Path:
    """Return the path of the file with the episodes."""
    return Path(dataset.storage.data_path) / "main_data.hdf5"


@contextmanager
def opened(dataset: minari.MinariDataset) -> Iterator[h5py.File]:
    """Open the file of the episodes for modification."""
    with h5py.File(data_file(dataset), "r+") as file:
        yield file
