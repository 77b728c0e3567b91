"""What is checked and made ready before training starts."""

from typing import Any

import numpy as np
from gymnasium import Env, spaces
from gymnasium.vector import VectorEnv
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.gtrxl.policy import CnnGTrXLPolicy, MultiInputGTrXLPolicy, policy_for
from rlxf.attention import Compressive, TransformerSpec
from rlxf.envs.make import make_vec_env
from rlxf.envs.spaces import check_spaces
from rlxf.envs.step_checks import with_checked_steps
from rlxf.envs.vector import as_vec_env, has_filler_rows
from rlxf.training.joining import here


def as_training_env(env: str | Env | VecEnv | VectorEnv | None, n_envs: int, seed: int | None) -> Any:
    """What SB3 understands: an id becomes this process's part of ``n_envs``, a ``VectorEnv`` is adapted.

    Raises:
        ValueError: if there is no such environment or ``n_envs`` is less than 1.
        TypeError: if a space is not supported, or ``env`` is nothing to train in.
    """
    if env is None:
        return None
    if isinstance(env, str):
        env = make_vec_env(env, here().part("n_envs", n_envs), seed)
    if isinstance(env, VectorEnv):
        env = as_vec_env(env)
    if not isinstance(env, Env | VecEnv):
        raise TypeError(f"env must be a Gymnasium id, an Env, a VecEnv or a VectorEnv, got {env!r}")
    check_spaces(env.observation_space, env.action_space)
    return with_checked_steps(env)


def check_sizes(n_steps: int, segment_length: int, batch_size: int, n_epochs: int) -> None:
    """Raise ValueError unless the rollout is a whole number of segments and minibatches hold some."""
    sizes = {"n_steps": n_steps, "segment_length": segment_length, "n_epochs": n_epochs}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for name, value in {"n_steps": n_steps, "batch_size": batch_size}.items():
        if value < segment_length or value % segment_length:
            raise ValueError(f"{name} must be a multiple of segment_length={segment_length}, got {value}")


def check_coefficients(
    gamma: float,
    gae_lambda: float,
    critic_lambda: float | None,
    vf_coef: float,
    max_grad_norm: float,
    target_kl: float | None,
    advantage_epsilon: float,
    reconstruction_coef: float,
) -> None:
    """Raise ValueError unless each number is in its range; NaN is in none."""
    discounts = {"gamma": gamma, "gae_lambda": gae_lambda, "critic_lambda": critic_lambda}
    for name, value in discounts.items():
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{name} must be from 0 to 1, got {value}")
    for name, value in {"vf_coef": vf_coef, "reconstruction_coef": reconstruction_coef}.items():
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    for name, value in {"max_grad_norm": max_grad_norm, "advantage_epsilon": advantage_epsilon}.items():
        if not value > 0:
            raise ValueError(f"{name} must be more than 0, got {value}")
    if target_kl is not None and not target_kl > 0:
        raise ValueError(f"target_kl must be more than 0, or None for no bound, got {target_kl}")


def check_schedule(name: str, value: float | Schedule, progress: float = 1.0) -> None:
    """Raise ValueError unless a number is finite and at least 0, or what a schedule gives; TypeError if none.

    Args:
        name: for the message.
        value: a number, or a function of the progress remaining.
        progress: where the function is looked at: 1 at its start, 0 at its end.
    """
    given = value(progress) if callable(value) else value
    if not hasattr(given, "__float__"):
        raise TypeError(f"{name} must be a number or a function of the progress remaining, got {given!r}")
    if not 0 <= given < float("inf"):
        raise ValueError(f"{name} must be finite and at least 0, got {given} at progress {progress:g}")


def check_policy(policy: type[BasePolicy], observation_space: spaces.Space) -> None:
    """Raise ValueError unless the policy is made for such observations."""
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


def check_whole_blocks(core: TransformerSpec, env: VecEnv) -> None:
    """Raise ValueError if filler rows would stand in the blocks of a memory: across episodes they would."""
    if isinstance(core.memory, Compressive) and has_filler_rows(env):
        raise ValueError(
            f"autoreset_mode=NEXT_STEP puts a filler row behind each episode, and with across_episodes=True "
            f"no block of {core.memory} in which one stands is ever whole, so it would be forgotten; make "
            f"the environments with autoreset_mode=AutoresetMode.SAME_STEP"
        )


def stack_observations(
    observations: list[np.ndarray] | list[dict[str, np.ndarray]],
) -> np.ndarray | dict[str, np.ndarray]:
    """N single observations as one batch."""
    if isinstance(observations[0], dict):
        return {key: np.stack([obs[key] for obs in observations]) for key in observations[0]}
    return np.stack(observations)
