"""Wrappers of Gymnasium around environments, and warnings about those that change what agents see or get."""

from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
from gymnasium import wrappers
from gymnasium.vector import VectorWrapper
from gymnasium.wrappers import vector
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv

from rlxf.envs.vector import GymnasiumVecEnv, innermost_env
from rlxf.utils.warnings import warn_user

NORMALIZED = (wrappers.NormalizeObservation, vector.NormalizeObservation)
"""Wrappers that normalize observations by running statistics."""
REWARDS = (
    wrappers.NormalizeReward,
    wrappers.TransformReward,
    vector.NormalizeReward,
    vector.TransformReward,
    vector.VectorizeTransformReward,
)
"""Wrappers that change rewards, and base classes of others that do."""
STATISTICS = (Monitor, wrappers.RecordEpisodeStatistics, vector.RecordEpisodeStatistics)
"""Wrappers whose returns `GymnasiumVecEnv` reports."""


def warn_of_unsaved_statistics(env: VecEnv) -> None:
    """Warn if a wrapper of Gymnasium normalizes observations, as no file of an agent has its statistics.

    Wrappers in the processes of Gymnasium's ``AsyncVectorEnv`` are not seen.
    """
    if _normalizes_elsewhere(env) or any(isinstance(each, NORMALIZED) for each in _wrappers_of(env)):
        warn_user(
            "observations are normalized by gymnasium.wrappers.NormalizeObservation, whose statistics are "
            "not saved with the agent, so it gets other observations in an evaluation or a resumed run: use "
            "VecNormalize(env, norm_reward=False) of Stable-Baselines3 and "
            "rlxf.training.save_normalizer(path, env), or --normalize-observations on the command line"
        )


def warn_of_changed_rewards(env: VecEnv) -> None:
    """Warn if a wrapper of Gymnasium changes rewards and no wrapper inside of it reports raw returns.

    Wrappers that ``gymnasium.make`` finds inside of an environment are part of the task.
    """
    changing: list[str] = []
    reporting = STATISTICS if isinstance(env.unwrapped, GymnasiumVecEnv) else Monitor
    for wrapper in _wrappers_of(env):
        if isinstance(wrapper, wrappers.OrderEnforcing):  # of gymnasium.make
            break
        if isinstance(wrapper, reporting):
            changing = []
        elif isinstance(wrapper, REWARDS):
            changing.append(type(wrapper).__name__)
    if changing:
        warn_user(
            f"the returns are sums of the rewards of gymnasium.wrappers.{changing[0]}, not of those of the "
            f"task: wrap the environment inside of it in stable_baselines3.common.monitor.Monitor, as "
            f"make_vec_env(id, n_envs, wrapper_class=...) does, or evaluate without it"
        )


def _envs_of(env: VecEnv) -> Sequence[Any]:
    """Return the single environments of this process; empty if there are none."""
    envs = getattr(innermost_env(env), "envs", ())
    return envs if isinstance(envs, list | tuple) else ()


def _normalizes_elsewhere(env: VecEnv) -> bool:
    """Return whether observations are normalized in other processes, as far as the environments report it."""
    if _envs_of(env):
        return False
    try:
        return any(env.env_is_wrapped(wrappers.NormalizeObservation, indices=[0]))
    except (AttributeError, NotImplementedError):  # of a VecEnv that is not one of SB3
        return False


def _wrappers_of(env: VecEnv) -> Iterator[Any]:
    """Yield the wrappers of Gymnasium of a vector environment and of its first environment, outermost first.

    Environments in other processes are left out.
    """
    inner: Any = env.unwrapped
    each: Any = inner.env if isinstance(inner, GymnasiumVecEnv) else None
    while isinstance(each, VectorWrapper):
        yield each
        each = each.env
    each = next(iter(_envs_of(env)), None)
    while isinstance(each, gymnasium.Wrapper):
        yield each
        each = each.env
