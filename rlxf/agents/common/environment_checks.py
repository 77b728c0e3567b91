"""Checks that observations and rewards of environments are finite and valid, also with ``VecNormalize``."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from rlxf.envs.batch_checks import check_casts, check_finite, check_shapes, warn_outside
from rlxf.envs.step_checks import range_fault
from rlxf.envs.wrapper_state import vec_wrappers
from rlxf.utils.errors import FaultyEnvironmentError
from rlxf.utils.warnings import warn_user

STATISTICS = ("obs_rms", "ret_rms", "returns")
"""Attributes of a ``VecNormalize`` that every step updates."""


def normalizers(env: VecEnv | None, option: str) -> list[VecNormalize]:
    """Return each ``VecNormalize`` around the environments with an option of `RAW`, outermost first."""
    return [each for each in vec_wrappers(env) if isinstance(each, VecNormalize) and getattr(each, option)]


def normalizes_observations(env: VecEnv | None, before: bool, name: str = "agent") -> bool:
    """Return True if a ``VecNormalize`` around the environments normalizes observations.

    Args:
        env: the environments for the next training of an agent.
        before: whether the agent learned from normalized observations before.
        name: name of that agent for the message, such as "teacher".

    Warns:
        UserWarning: if it did and the observations are raw now.
    """
    now = bool(normalizers(env, "norm_obs"))
    if before and not now:
        warn_user(
            f"the {name} was trained on observations normalized by VecNormalize, but the environments now "
            f"return raw ones: restore the statistics with "
            "agent.set_env(rlxf.training.load_normalizer(path, env))"
        )
    return now


def check_teacher_normalization(env: VecEnv | None, normalized: bool) -> None:
    """Check that a teacher gets observations as in its training, if ``VecNormalize`` normalized them.

    Args:
        env: the environments of the student.
        normalized: whether the teacher learned from normalized observations.

    Warns:
        UserWarning: if it did, and the observations are raw or their statistics change.
    """
    changing = [each for each in normalizers(env, "norm_obs") if each.training]
    if normalizes_observations(env, normalized, "teacher") and normalized and changing:
        warn_user(
            "the teacher was trained with the statistics of its VecNormalize, but those of the student's "
            "environments change in training: restore the teacher's statistics with "
            "rlxf.training.load_normalizer(path, env), and set training=False on the result"
        )


RAW = {
    "norm_obs": "normalizes observations itself, with the statistics of its data",
    "norm_reward": "compares returns with those of its data",
}
"""Option of ``VecNormalize`` -> reason why an agent needs it to be False."""


def check_raw(env: VecEnv, option: str) -> None:
    """Raise ValueError if a ``VecNormalize`` around the environments has an option of `RAW`."""
    if normalizers(env, option):
        raise ValueError(
            f"the agent {RAW[option]}, but a VecNormalize around the environments changes them: set its "
            f"{option}=False, or remove it"
        )


@contextmanager
def restore_stats_on_error(env: VecEnv | None) -> Iterator[None]:
    """Restore the statistics of a ``VecNormalize`` if the body raises `FaultyEnvironmentError`.

    ``VecNormalize`` updates its statistics before a value can be checked, and a single NaN makes them NaN.
    """
    normalizer = unwrap_vec_normalize(env)  # type: ignore[arg-type]  # None has none
    own = {} if normalizer is None else vars(normalizer)
    kept = deepcopy({name: own[name] for name in STATISTICS if name in own})
    try:
        yield
    except FaultyEnvironmentError:
        own.update(kept)
        raise


def check_observations(
    name: str,
    env: VecEnv,
    obs: VecEnvObs,
    step: int,
    environments: Sequence[int] | None = None,
    space: spaces.Space[Any] | None = None,
) -> None:
    """Raise `FaultyEnvironmentError` unless observations are finite, of the right shape and valid choices.

    They must also keep their values in the dtype of their space, in which a rollout is stored.

    Under a ``VecNormalize`` the raw values are checked first: after normalization one NaN affects all rows.
    The space of a ``VecNormalize`` is that of the raw observations, so bounds apply to the raw values.

    Args:
        name: name of the observations for the message, such as "first observation".
        env: the environments that returned the observations.
        obs: observations as the agent receives them.
        step: steps that each environment has taken.
        environments: number of the environment of each row; None for 0, 1, 2 ...
        space: space of one observation; None for that of ``env``.

    Warns:
        UserWarning: once, if an observation is outside of the bounds of its space.
    """
    normalizer = unwrap_vec_normalize(env)
    raw = None if normalizer is None else vars(normalizer).get("old_obs")  # unset before the first reset
    if raw is not None:
        check_finite(name, raw, step, environments)
    check_finite(name, obs, step, environments)
    space = space or env.observation_space
    check_shapes(space, obs, step)
    _check_casts(space, normalizer, obs, step)
    _check_choices(space, obs, step)
    if normalizer is None:
        warn_outside(env, space, obs, step, environments)
    elif raw is not None:
        warn_outside(normalizer.venv, normalizer.venv.observation_space, raw, step, environments)


def _check_casts(
    space: spaces.Space[Any], normalizer: VecNormalize | None, obs: VecEnvObs, step: int
) -> None:
    """Apply `check_casts` to the parts that a ``VecNormalize`` does not normalize: the others are float32."""
    if normalizer is None or not normalizer.norm_obs:
        check_casts(space, obs, step)
    elif isinstance(space, spaces.Dict):
        for key in space.keys() - set(normalizer.norm_obs_keys or ()):
            check_casts(space[key], obs[key], step)


def check_not_reset_result(observation: Any) -> None:
    """Raise ValueError if an observation is the pair that Gymnasium's ``reset`` returns, as SB3 does."""
    if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict):
        raise ValueError(
            "got a tuple of an observation and a dict, as reset of a Gymnasium environment returns it; pass "
            "the observation only: observation, info = env.reset()"
        )


def check_step_results(
    env: VecEnv,
    obs: VecEnvObs,
    rewards: np.ndarray,
    dones: np.ndarray,
    step: int,
    environments: Sequence[int] | None = None,
    space: spaces.Space[Any] | None = None,
) -> None:
    """Raise `FaultyEnvironmentError` unless all results of an environment step are finite and valid.

    Under a ``VecNormalize`` the raw rewards are checked first, as the raw observations are.

    Args:
        env: the environments that took the step.
        obs: observations as the agent receives them.
        rewards: (E,), as the agent receives them.
        dones: (E,), booleans or numbers, as the environments returned them.
        step: steps that each environment has taken.
        environments: number of the environment of each row; None for 0, 1, 2 ...
        space: space of one observation; None for that of ``env``.

    Warns:
        UserWarning: once, if an observation is outside of the bounds of its space.
    """
    _check_numeric("dones", dones, env.num_envs, "True or False", step)
    normalizer = unwrap_vec_normalize(env)
    if normalizer is not None:
        check_finite("reward", normalizer.get_original_reward(), step, environments)
    _check_numeric("rewards", rewards, env.num_envs, "numbers", step)
    check_finite("reward", rewards, step, environments)
    if rewards.dtype != np.float32:
        with np.errstate(over="ignore"):
            check_finite("float32 reward", rewards.astype(np.float32), step, environments)
    check_observations("observation", env, obs, step, environments, space)


def _check_numeric(name: str, values: np.ndarray, n_envs: int, kind: str, step: int) -> None:
    """Raise FaultyEnvironmentError unless there is one number for each environment."""
    if values.shape != (n_envs,):
        raise FaultyEnvironmentError(
            f"{name} at step {step} must be an array of shape {(n_envs,)}, got shape {values.shape}: return "
            f"{kind} of shape () from step of each environment, e.g. array.item() in place of an array"
        )
    if values.dtype.kind not in "biuf":
        raise FaultyEnvironmentError(
            f"{name} at step {step} must be {kind}, got {values.tolist()}; correct the environment, or wrap "
            f"it"
        )


def _check_choices(space: spaces.Space[Any], obs: VecEnvObs, step: int) -> None:
    """Reject invalid choices and bits, since some vector environments do not check each environment."""
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            _check_choices(part, obs[key], step)  # type: ignore[call-overload]
        return
    fault = range_fault(space, obs)
    if fault is not None:
        raise FaultyEnvironmentError(
            f"an observation at step {step} {fault}; correct the environment, or wrap it"
        )
