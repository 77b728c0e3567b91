"""Environments that an agent trains in, in a form that Stable-Baselines3 accepts."""

from typing import Any

from gymnasium import Env
from gymnasium.vector import VectorEnv
from stable_baselines3.common.vec_env import VecEnv

from rlxf.envs.filler_rows import check_frame_stack, warn_of_counted_filler_rows
from rlxf.envs.make import check_is_env, make_vec_env
from rlxf.envs.spaces import check_has_spaces, check_spaces
from rlxf.envs.step_checks import with_checked_steps
from rlxf.envs.tensor_vec_env import as_vec_env
from rlxf.envs.wrapper_state import check_no_normalized_images, check_one_normalizer
from rlxf.training.distributed import process_group
from rlxf.utils.warnings import warn_user


def as_training_env(env: str | Env | VecEnv | VectorEnv | None, n_envs: int, seed: int | None) -> Any:
    """Convert ``env`` to a type that SB3 accepts.

    For an id, this process's share of ``n_envs`` environments is created. A ``VectorEnv`` is wrapped.

    Raises:
        ValueError: if the id is unknown, ``n_envs`` is less than 1, or by `checked_training_env`.
        TypeError: if a space is not supported, or ``env`` is not an environment.
    """
    if env is None:
        return None
    check_is_env(env)
    if isinstance(env, str):
        env = make_vec_env(env, process_group().split_total("n_envs", n_envs), seed)
    if isinstance(env, VectorEnv):
        env = as_vec_env(env)
    return checked_training_env(env)


def checked_training_env(env: Env | VecEnv) -> Any:
    """Return the environment with checks of its steps, after checks of its spaces and wrappers.

    Raises:
        ValueError: by `check_frame_stack`, `check_one_normalizer` and `check_no_normalized_images`.
        TypeError: if a space is missing or not supported.

    Warns:
        UserWarning: by `warn_of_counted_filler_rows`.
    """
    check_has_spaces(env)
    check_spaces(env.observation_space, env.action_space)
    if isinstance(env, VecEnv):
        check_frame_stack(env)
        check_one_normalizer(env)
        check_no_normalized_images(env)
        warn_of_counted_filler_rows(env)
    return with_checked_steps(env)


def warn_of_ignored_n_envs(n_envs: int, default: int, env: Any) -> None:
    """Warn if a number of environments is chosen, but ``env`` is an object with another number.

    Args:
        n_envs: the chosen number, of all processes.
        default: the number without a choice.
        env: argument of the user: an id, an environment of this process, or None.
    """
    if env is None or isinstance(env, str):
        return
    processes = process_group().world_size
    given = getattr(env, "num_envs", 1) * processes
    if n_envs not in (default, given):
        each = "" if processes == 1 else f" in {processes} processes"
        warn_user(
            f"n_envs={n_envs} has no effect, since env is an object with {given} environment(s){each}: pass "
            f"an id, or the result of rlxf.envs.make_vec_env(ID_OR_FUNCTION, n_envs={n_envs // processes})"
        )


def check_has_env(env: VecEnv | None) -> None:
    """Raise ValueError if the agent has no training environment."""
    if env is None:
        raise ValueError(
            "the agent was loaded without an environment to train in: load it with load(path, env=...), or "
            "call set_env(...) before learn"
        )
