"""The environments an agent is evaluated in."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    VecEnv,
    VecMonitor,
    VecNormalize,
    is_vecenv_wrapped,
    unwrap_vec_normalize,
)

from rlxf.envs.make import make_vec_env
from rlxf.envs.resting import awake_at_the_end
from rlxf.envs.side_by_side import side_by_side
from rlxf.envs.vector import as_vec_env, has_filler_rows

EnvLike = str | gymnasium.Env | VectorEnv | VecEnv


@contextmanager
def opened(agent: Any, env: EnvLike | None, n_envs: int, seed: int | None) -> Iterator[VecEnv]:
    """Environments ready to be reset: seeded, normalised as in training, their statistics at rest.

    What is made here is closed at the end; what was given stays open.

    Raises:
        TypeError: if ``env`` is nothing to play in.
        ValueError: if ``env`` is None and the agent has none, or it has other spaces than the agent's data.
    """
    with _prepared(agent, env, n_envs) as vec_env:
        if seed is not None:
            vec_env.seed(seed)
        with _at_rest(unwrap_vec_normalize(vec_env)), awake_at_the_end(vec_env):
            yield vec_env


def warn_of_filler_rows(agent: Any, env: VecEnv) -> None:
    """Warn if there are filler rows, and the agent remembers what is between two episodes, too."""
    if getattr(agent, "across_episodes", False) and has_filler_rows(env):
        warnings.warn(
            "with across_episodes=True the agent takes filler rows, of which it learned none, for steps, and "
            "remembers them: evaluate in an environment with autoreset_mode=AutoresetMode.SAME_STEP",
            stacklevel=3,
        )


def warn_of_missing_statistics(agent: Any, env: VecEnv) -> None:
    """Warn if the agent learned under a ``VecNormalize`` and gets raw observations here."""
    if getattr(agent, "normalized_observations", False) and unwrap_vec_normalize(env) is None:
        warnings.warn(
            "the agent learned from observations that a VecNormalize made, and sees raw ones here: wrap env "
            "with the statistics of the training, rlxf.training.load_normalizer(path, env), or load the "
            "agent with such an environment, load(path, env=...)",
            stacklevel=3,
        )


def is_monitored(env: VecEnv) -> bool:
    """Whether SB3's monitor puts the raw return of an episode in its last info."""
    return is_vecenv_wrapped(env, VecMonitor) or all(env.env_is_wrapped(Monitor))


def raw_rewards(env: VecEnv, rewards: np.ndarray) -> np.ndarray:
    """Rewards of the last step before ``VecNormalize`` scaled them."""
    normalizer = unwrap_vec_normalize(env)
    return rewards if normalizer is None else normalizer.get_original_reward()


@contextmanager
def vectorised(env: EnvLike, n_envs: int) -> Iterator[VecEnv]:
    """Environments side by side: as given, or ``n_envs`` of an id, which are closed at the end.

    Raises:
        TypeError: if ``env`` is nothing to play in.
        ValueError: if the id is unknown.
    """
    if isinstance(env, VecEnv):
        yield env
    elif isinstance(env, str):
        made = make_vec_env(env, n_envs)
        try:
            yield made
        finally:
            made.close()
    else:
        yield _adapted(env)


def normalised_as_in_training(agent: Any, env: VecEnv) -> VecEnv:
    """``env`` as the agent saw it in training: with its ``VecNormalize``, if observations were normalised.

    An ``env`` that brings a ``VecNormalize`` of its own is left as it is.
    """
    get_normalizer = getattr(agent, "get_vec_normalize_env", None)
    trained = None if get_normalizer is None else get_normalizer()
    if trained is None or not trained.norm_obs or unwrap_vec_normalize(env) is not None:
        return env
    wrapped = VecNormalize(
        env,
        training=False,
        norm_reward=False,
        clip_obs=trained.clip_obs,
        epsilon=trained.epsilon,
        norm_obs_keys=trained.norm_obs_keys,
    )
    wrapped.obs_rms = deepcopy(trained.obs_rms)
    return wrapped


@contextmanager
def _prepared(agent: Any, env: EnvLike | None, n_envs: int) -> Iterator[VecEnv]:
    if env is None:
        with _own(agent, n_envs) as own:
            yield own
    else:
        with vectorised(env, n_envs) as vec_env:
            if hasattr(agent, "check_env"):
                agent.check_env(vec_env)
            yield normalised_as_in_training(agent, vec_env)


def _adapted(env: gymnasium.Env | VectorEnv) -> VecEnv:
    if isinstance(env, VectorEnv):
        return as_vec_env(env)
    if isinstance(env, gymnasium.Env):
        return side_by_side([lambda: env])
    raise TypeError(
        f"env must be an id, a VecEnv, a VectorEnv, an Env or None, got {type(env).__name__}: {env!r}"
    )


@contextmanager
def _own(agent: Any, n_envs: int) -> Iterator[VecEnv]:
    """The agent's environment, or that of its data, made for now."""
    env = agent.get_env() if hasattr(agent, "get_env") else None
    if env is not None:
        yield env
    elif hasattr(agent, "make_env"):
        made = agent.make_env(n_envs, None)
        try:
            yield made
        finally:
            made.close()
    else:
        raise ValueError(
            f"{type(agent).__name__} has no environment of its own: pass env, e.g. a Gymnasium id"
        )


@contextmanager
def _at_rest(normalizer: VecNormalize | None) -> Iterator[None]:
    """Evaluation must not move the statistics that training goes on with."""
    if normalizer is None:
        yield
        return
    training, normalizer.training = normalizer.training, False
    try:
        yield
    finally:
        normalizer.training = training
