"""Vector environment in this process, for any supported observation space."""

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
    """Create one environment with each function, as a vector environment that steps them one by one.

    It is a `DummyVecEnv` of `Resting` environments. A `DummyVecEnv` supports neither nested Dict or Tuple
    spaces nor text. For these, the function uses Gymnasium's `SyncVectorEnv` under the same interface and
    with the same seeds; its environments cannot be paused.

    Raises:
        TypeError: if a space is not supported (`check_playable`).
    """
    envs = [make() for make in makes]
    if is_one_level(envs[0].observation_space):
        return DummyVecEnv([partial(_identity, Resting(env)) for env in envs])
    env_fns: list[Make] = [partial(_identity, env) for env in envs]
    return as_vec_env(SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP))


def _identity(env: gymnasium.Env) -> gymnasium.Env:
    return env


def is_one_level(space: spaces.Space[Any]) -> bool:
    """Return whether a `DummyVecEnv` supports the observation space: no nested parts and no text."""
    parts = parts_of(space).values() if isinstance(space, spaces.Dict | spaces.Tuple) else [space]
    return all(isinstance(part, FLAT) for part in parts)
