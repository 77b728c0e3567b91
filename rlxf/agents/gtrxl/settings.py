"""What is checked and made ready before training starts."""

from typing import Any

import numpy as np
from gymnasium import Env, spaces
from gymnasium.vector import VectorEnv
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.gtrxl.policy import CnnGTrXLPolicy, MultiInputGTrXLPolicy, policy_for
from rlxf.envs.make import make_vec_env
from rlxf.envs.spaces import check_spaces
from rlxf.envs.vector import as_vec_env


def as_training_env(env: str | Env | VecEnv | VectorEnv | None, n_envs: int, seed: int | None) -> Any:
    """What SB3 understands: an id becomes ``n_envs`` environments, a ``VectorEnv`` is adapted.

    Raises:
        ValueError: if there is no such environment or ``n_envs`` is less than 1.
    """
    if isinstance(env, str):
        if n_envs < 1:
            raise ValueError(f"n_envs must be at least 1, got {n_envs}")
        return make_vec_env(env, n_envs, seed)
    return as_vec_env(env) if isinstance(env, VectorEnv) else env


def check_sizes(n_steps: int, segment_length: int, batch_size: int, n_epochs: int) -> None:
    """Raise ValueError unless the rollout is a whole number of segments and minibatches hold some."""
    sizes = {"n_steps": n_steps, "segment_length": segment_length, "n_epochs": n_epochs}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for name, value in {"n_steps": n_steps, "batch_size": batch_size}.items():
        if value < segment_length or value % segment_length:
            raise ValueError(f"{name} must be a multiple of segment_length={segment_length}, got {value}")


def check_policy(
    policy: type[BasePolicy], observation_space: spaces.Space, action_space: spaces.Space
) -> None:
    """Raise unless the spaces are supported and the policy is made for them."""
    check_spaces(observation_space, action_space)
    needs_dict, has_dict = (
        issubclass(policy, MultiInputGTrXLPolicy),
        isinstance(observation_space, spaces.Dict),
    )
    needs_image = issubclass(policy, CnnGTrXLPolicy)
    if needs_dict != has_dict or (needs_image and policy_for(observation_space) != CnnGTrXLPolicy.__name__):
        raise ValueError(
            f"{policy.__name__} does not suit the observation space {observation_space}; "
            f"use {policy_for(observation_space)!r}"
        )


def stack_observations(
    observations: list[np.ndarray] | list[dict[str, np.ndarray]],
) -> np.ndarray | dict[str, np.ndarray]:
    """N single observations as one batch."""
    if isinstance(observations[0], dict):
        return {key: np.stack([obs[key] for obs in observations]) for key in observations[0]}
    return np.stack(observations)
