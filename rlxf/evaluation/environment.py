"""Preparation of environments for an evaluation: construction, seeds, normalization, and its warnings."""

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    VecEnv,
    VecMonitor,
    VecNormalize,
    unwrap_vec_normalize,
    unwrap_vec_wrapper,
)

from rlxf.data.reference_scores import ReferenceScores, scores_from_table
from rlxf.envs.curriculum import has_curriculum
from rlxf.envs.filler_rows import check_frame_stack, has_filler_rows
from rlxf.envs.make import EnvLike, as_vectorized
from rlxf.envs.sb3_vec_env import calling_at_exit, resume_envs_at_exit
from rlxf.envs.specs import spec_of
from rlxf.envs.vector import innermost_env
from rlxf.envs.wrapper_state import check_one_normalizer
from rlxf.evaluation.agents import (
    has_persistent_memory,
    own_env,
    recorded_env,
    reference_scores,
    saw_normalized_observations,
    training_env,
    training_normalizer,
)
from rlxf.utils.warnings import warn_user


def reference_scores_of(agent: Any, env: VecEnv) -> ReferenceScores | None:
    """Return the reference scores of the agent's data, else of the environment in `TABLE`, else None.

    Those of the data hold in the environment of the data, in any version. They are not used in an environment
    of another name, or with other arguments or another time limit, which change returns. Those of `TABLE` do
    not depend on the time limit.
    """
    scores, recorded = reference_scores(agent), recorded_env(agent)
    if scores is not None and (recorded is None or recorded.is_same_task(spec_of(env))):
        return scores
    spec = spec_of(env)
    return None if spec is None else scores_from_table(spec.id, getattr(spec, "kwargs", None))


@contextmanager
def prepared_env(agent: Any, env: EnvLike | None, n_envs: int, seed: int | None) -> Iterator[VecEnv]:
    """Context manager for environments that are seeded and normalized as in training, before their reset.

    Normalization statistics are not updated. Environments created here are closed at the end; those of the
    caller stay open. If they are the agent's training environments, `learn` resets them afterwards.

    Raises:
        TypeError: if ``env`` is not an environment or an id.
        ValueError: if ``env`` and the environment of the agent are None, if the spaces of ``env`` differ from
            those of the agent's data, or by `check_frame_stack` and `check_one_normalizer`.
    """
    with _prepared(agent, env, n_envs) as vec_env:
        check_frame_stack(vec_env)
        check_one_normalizer(vec_env)
        with (
            borrowed_env([agent], vec_env),
            _frozen_statistics(unwrap_vec_normalize(vec_env)),
            resume_envs_at_exit(vec_env),
        ):
            if seed is not None:
                vec_env.seed(seed)
            yield vec_env


@contextmanager
def borrowed_env(agents: Iterable[Any], env: VecEnv) -> Iterator[None]:
    """Context manager for episodes that are not those of a training, in environments of any wrappers.

    Environments with a curriculum use its last stage, and do not advance. The agents that train in the
    environments begin new episodes afterwards.
    """
    trained = [one for one in agents if hasattr(one, "discard_episodes") and is_trained_in(one, env)]
    try:
        with _task_of_curriculum(env):
            yield
    finally:
        for agent in trained:
            agent.discard_episodes()


def is_trained_in(agent: Any, env: EnvLike) -> bool:
    """Return whether an environment is among those in which an agent trains, in any wrapper."""
    own = training_env(agent)
    return own is not None and not _innermost(own).isdisjoint(_innermost(env))


def check_not_trained_in(agent: Any, env: EnvLike, user: str, alternative: str) -> None:
    """Raise ValueError if an agent trains in an environment in which other episodes would be played.

    Args:
        agent: the agent.
        env: the environment, or its id.
        user: name of what plays the episodes, for the message.
        alternative: an environment to pass instead, for the message.
    """
    if is_trained_in(agent, env):
        raise ValueError(
            f"{user} needs an environment of its own, got that in which the agent trains, whose episodes it "
            f"would end: pass another one, e.g. {alternative}"
        )


def _innermost(env: EnvLike) -> set[int]:
    """Return the ids of the single environments or, if they are not in this process, of their container."""
    if isinstance(env, str):
        return set()
    inner = innermost_env(env) if isinstance(env, VecEnv) else env.unwrapped
    envs = [inner] if isinstance(inner, gymnasium.Env) else getattr(inner, "envs", None)
    if not isinstance(envs, list | tuple):
        envs = [inner]
    return {id(getattr(each, "unwrapped", each)) for each in envs}


def warn_of_filler_rows(agent: Any, env: VecEnv) -> None:
    """Warn if the environment has reset steps and the memory of the agent persists across episodes."""
    if has_persistent_memory(agent) and has_filler_rows(env):
        warn_user(
            "with persist_memory_across_episodes=True the agent processes reset steps, which training "
            "masked, as steps of episodes and stores them in its memory: evaluate with "
            "autoreset_mode=AutoresetMode.SAME_STEP"
        )


def warn_of_missing_statistics(agent: Any, env: VecEnv) -> None:
    """Warn if the agent was trained with a ``VecNormalize``, but observations are raw here."""
    if saw_normalized_observations(agent) and unwrap_vec_normalize(env) is None:
        warn_user(
            "the agent was trained on observations normalized by VecNormalize, but env returns raw ones: "
            "wrap env with the statistics of the training, rlxf.training.load_normalizer(path, env), or load "
            "the agent with the wrapped environment, load(path, env=...)"
        )


def is_monitored(env: VecEnv) -> bool:
    """Return whether SB3's ``Monitor`` or ``VecMonitor`` reports the raw return of each episode.

    A ``VecMonitor`` around a ``VecNormalize`` reports the sum of scaled rewards, and one around environments
    with reset steps counts them as steps of episodes.
    """
    monitor = unwrap_vec_wrapper(env, VecMonitor)
    if monitor is None:
        return all(env.env_is_wrapped(Monitor))
    if has_filler_rows(env):
        return False
    normalizer = unwrap_vec_normalize(monitor)
    return normalizer is None or not normalizer.norm_reward


def raw_rewards(env: VecEnv, rewards: np.ndarray) -> np.ndarray:
    """Return the rewards of the last step before the scaling of ``VecNormalize``."""
    normalizer = unwrap_vec_normalize(env)
    return rewards if normalizer is None else normalizer.get_original_reward()


def with_training_normalization(agent: Any, env: VecEnv) -> VecEnv:
    """Wrap ``env`` in a copy of the agent's ``VecNormalize``, if training normalized observations.

    An ``env`` that already has a ``VecNormalize`` is returned unchanged.

    Raises:
        ValueError: if the statistics are of observations with other shapes than those of ``env``.
    """
    normalizer = training_normalizer(agent)
    if normalizer is None or unwrap_vec_normalize(env) is not None:
        return env
    wrapped = deepcopy(normalizer)  # without its environments, as in a pickle
    try:
        wrapped.set_venv(env)
    except AssertionError as error:  # how SB3 refuses other shapes
        raise ValueError(
            f"the training normalizes observations before other wrappers change them, so its statistics do "
            f"not fit env ({error}): pass env with a VecNormalize in the same place, or train with it as the "
            f"outermost wrapper, e.g. VecNormalize(VecFrameStack(env, 4))"
        ) from error
    wrapped.training = wrapped.norm_reward = False
    return wrapped


def copy_statistics(source: VecEnv, target: VecEnv) -> None:
    """Copy the statistics of the ``VecNormalize`` of ``source`` to that of ``target``, if both have one.

    Other wrappers may differ, in contrast to those of SB3's function for this.
    """
    trained, normalizer = unwrap_vec_normalize(source), unwrap_vec_normalize(target)
    if trained is None or normalizer is None:
        return
    normalizer.ret_rms = deepcopy(trained.ret_rms)
    if trained.norm_obs:
        normalizer.obs_rms = deepcopy(trained.obs_rms)


@contextmanager
def _prepared(agent: Any, env: EnvLike | None, n_envs: int) -> Iterator[VecEnv]:
    """Context manager for ``env``; None means the agent's environment, else that of its data."""
    if env is not None:
        with as_vectorized(env, n_envs) as vec_env:
            yield _adapted(agent, vec_env)
    elif (own := own_env(agent)) is not None:
        yield own
    elif hasattr(agent, "make_env"):
        with closing(agent.make_env(n_envs, None)) as made:
            yield made
    else:
        raise ValueError(f"{type(agent).__name__} has no environment: pass env, e.g. a Gymnasium id")


def _adapted(agent: Any, env: VecEnv) -> VecEnv:
    """Return an environment with the normalization of the training, after the checks of the agent."""
    if hasattr(agent, "check_env"):
        agent.check_env(env)
    return with_training_normalization(agent, env)


@contextmanager
def _task_of_curriculum(env: VecEnv) -> Iterator[None]:
    """Context manager in which environments with a curriculum use its last stage, and do not advance."""
    if not has_curriculum(env):
        yield
        return
    env.env_method("begin_evaluation")
    with calling_at_exit(partial(env.env_method, "end_evaluation")):
        yield


@contextmanager
def _frozen_statistics(normalizer: VecNormalize | None) -> Iterator[None]:
    """Context manager in which ``VecNormalize`` does not update the statistics of the training."""
    if normalizer is None:
        yield
        return
    training, normalizer.training = normalizer.training, False
    try:
        yield
    finally:
        normalizer.training = training
