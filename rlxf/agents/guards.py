"""A value that is not finite is stopped where it came from, and spoils no statistics."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from rlxf.envs.bounds import warn_outside
from rlxf.envs.errors import FaultyEnvironmentError
from rlxf.envs.finite import check_finite, check_shapes
from rlxf.envs.step_checks import range_fault

STATISTICS = ("obs_rms", "ret_rms", "returns")
"""What a ``VecNormalize`` learns from each step."""


def normalizes_observations(env: VecEnv | None, before: bool) -> bool:
    """Return True if a ``VecNormalize`` around the environments normalizes observations.

    Args:
        env: the environments for the next training of an agent.
        before: whether the agent learned from normalized observations before.

    Warns:
        UserWarning: if it did and the observations are raw now.
    """
    normalizer = unwrap_vec_normalize(env)  # type: ignore[arg-type]  # None has none
    now = normalizer is not None and normalizer.norm_obs
    if before and not now:
        warnings.warn(
            "the agent learned from observations that a VecNormalize made, and goes on with raw ones: wrap "
            "its environments with those statistics, set_env(rlxf.training.load_normalizer(path, env))",
            stacklevel=4,
        )
    return now


@contextmanager
def unspoiled(env: VecEnv | None) -> Iterator[None]:
    """Put the statistics of a ``VecNormalize`` back on a `FaultyEnvironmentError`.

    It takes a value into them before anybody can look at it, and one NaN makes all that follow NaN.
    """
    normalizer = unwrap_vec_normalize(env)  # type: ignore[arg-type]  # None has none
    own = {} if normalizer is None else vars(normalizer)
    kept = deepcopy({name: own[name] for name in STATISTICS if name in own})
    try:
        yield
    except FaultyEnvironmentError:
        own.update(kept)
        raise


def check_first(
    env: VecEnv | None,
    obs: VecEnvObs,
    step: int,
    environments: Sequence[int] | None = None,
    space: spaces.Space[Any] | None = None,
) -> None:
    """Raise `FaultyEnvironmentError` unless initial observations are finite and fit their space.

    Args:
        env: gave them.
        obs: as the agent sees them.
        step: steps that each environment has taken.
        environments: number of the environment of each row; None for 0, 1, 2 ...
        space: of one observation; None for that of ``env``.

    Warns:
        UserWarning: once, if an observation is outside of the bounds of its space.
    """
    normalizer = unwrap_vec_normalize(env)  # type: ignore[arg-type]  # None has none
    if normalizer is not None and "old_obs" in vars(normalizer):  # it has none before its first reset
        check_finite("first observation", normalizer.old_obs, step, environments)
    check_finite("first observation", obs, step, environments)
    if env is not None:
        _check_space(env, space or env.observation_space, obs, step, environments)


def check_step(
    env: VecEnv,
    obs: VecEnvObs,
    rewards: np.ndarray,
    step: int,
    environments: Sequence[int] | None = None,
    space: spaces.Space[Any] | None = None,
    dones: np.ndarray | None = None,
) -> None:
    """Raise `FaultyEnvironmentError` unless all results of an environment step are finite and valid.

    Under a ``VecNormalize`` what they gave is looked at first: one NaN makes the mean of all of them NaN.

    Args:
        env: gave it.
        obs: as the agent sees them.
        rewards: (E,), as the agent sees them.
        step: steps that each environment has taken.
        environments: number of the environment of each row; None for 0, 1, 2 ...
        space: of one observation; None for that of ``env``.
        dones: (E,), as the environments gave them, to be booleans or numbers; None if they are not checked.

    Warns:
        UserWarning: once, if an observation is outside of the bounds of its space.
    """
    if dones is not None and dones.dtype.kind not in "biuf":
        raise FaultyEnvironmentError(
            f"dones at step {step} are {dones.tolist()}, not True or False; correct the environment, or wrap "
            f"it"
        )
    normalizer = unwrap_vec_normalize(env)
    if normalizer is not None:
        check_finite("reward", normalizer.get_original_reward(), step, environments)
        check_finite("observation", normalizer.old_obs, step, environments)
    if rewards.dtype.kind not in "biuf":
        raise FaultyEnvironmentError(
            f"rewards at step {step} are {rewards.tolist()}, not numbers; correct the environment, or wrap it"
        )
    check_finite("reward", rewards, step, environments)
    check_finite("observation", obs, step, environments)
    _check_space(env, space or env.observation_space, obs, step, environments)


def _check_space(
    env: VecEnv,
    space: spaces.Space[Any],
    obs: VecEnvObs,
    step: int,
    environments: Sequence[int] | None,
) -> None:
    """Reject observations of a wrong shape or with invalid choices, and warn of those outside of the bounds.

    A ``VecNormalize`` keeps the space of what it normalizes: its bounds are those of the numbers before.
    """
    check_shapes(space, obs, step)
    _check_choices(space, obs, step)
    normalizer = unwrap_vec_normalize(env)
    if normalizer is None:
        warn_outside(env, space, obs, step, environments)
    elif "old_obs" in vars(normalizer):
        warn_outside(env, normalizer.venv.observation_space, normalizer.old_obs, step, environments)


def _check_choices(space: spaces.Space[Any], obs: VecEnvObs, step: int) -> None:
    """Reject invalid choices and bits: some vector environments do not check each environment."""
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            _check_choices(part, obs[key], step)  # type: ignore[call-overload]
        return
    fault = range_fault(space, obs)
    if fault is not None:
        raise FaultyEnvironmentError(
            f"an observation at step {step} {fault}; correct the environment, or wrap it"
        )
