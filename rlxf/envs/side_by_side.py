"""Environments side by side, whatever they show."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from rlxf.envs.resting import Resting
from rlxf.envs.trajectories.parts import FLAT, parts_of
from rlxf.envs.vector import as_vec_env

Make = Callable[[], gymnasium.Env]


def side_by_side(makes: Sequence[Make]) -> VecEnv:
    """One environment of each function, stepped one after the other in this process; they can `rest`.

    A Dict or a Tuple within another one, and text, are more than Stable-Baselines3's `DummyVecEnv` holds:
    environments that show these come in Gymnasium's `SyncVectorEnv`, behind the same interface, seeded alike;
    these do not rest.

    Raises:
        TypeError: if a space is not supported (`check_playable`).
    """
    envs = [make() for make in makes]
    if is_one_level(envs[0].observation_space):
        return DummyVecEnv([partial(_itself, Resting(env)) for env in envs])
    made: list[Make] = [partial(_itself, env) for env in envs]
    return as_vec_env(SyncVectorEnv(made, autoreset_mode=AutoresetMode.SAME_STEP))


def _itself(env: gymnasium.Env) -> gymnasium.Env:
    return env


def is_one_level(space: spaces.Space[Any]) -> bool:
    """Whether a `DummyVecEnv` holds what is shown."""
    parts = parts_of(space).values() if isinstance(space, spaces.Dict | spaces.Tuple) else [space]
    return all(isinstance(part, FLAT) for part in parts)
