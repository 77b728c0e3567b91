"""Reset steps of environments that reset in the step after the end of an episode (NEXT_STEP).

`rlxf.envs.vector.GymnasiumVecEnv` marks them. They are steps of no episode.
"""

from typing import Any

from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.vec_env import (
    VecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
    is_vecenv_wrapped,
)
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from rlxf.envs.vector import GymnasiumVecEnv
from rlxf.utils.warnings import warn_user


def has_filler_rows(env: VecEnv) -> bool:
    """Return whether a reset step follows the end of each episode (NEXT_STEP); see `GymnasiumVecEnv`."""
    inner = env.unwrapped
    next_step = AutoresetMode.NEXT_STEP
    return isinstance(inner, GymnasiumVecEnv) and inner.env.metadata["autoreset_mode"] is next_step


def check_frame_stack(env: VecEnv) -> None:
    """Raise ValueError if a ``VecFrameStack`` is around environments with reset steps.

    It clears its frames at the end of an episode. The first observation of the next one, in the reset step,
    would be stacked on the last of the previous one.
    """
    if is_vecenv_wrapped(env, VecFrameStack) and has_filler_rows(env):
        raise ValueError(
            "VecFrameStack mixes the observations of two episodes if autoreset_mode=NEXT_STEP: create the "
            "environments with autoreset_mode=AutoresetMode.SAME_STEP"
        )


def warn_of_counted_filler_rows(env: VecEnv) -> None:
    """Warn if a ``VecMonitor`` counts reset steps as steps of episodes."""
    if is_vecenv_wrapped(env, VecMonitor) and has_filler_rows(env):
        warn_user(
            "VecMonitor reports each episode but the first one a step too long if autoreset_mode=NEXT_STEP: "
            "remove it, since episodes are reported without it, too"
        )


def shows_filler_rows(env: VecEnv, observation: VecEnvObs) -> bool:
    """Return whether an observation is the latest of the environments and the next step is a reset step.

    The result is False after `GymnasiumVecEnv.load_state` until the next step, because the latest observation
    is unknown.

    Args:
        env: the environments, possibly in wrappers that pass observations on, normalize or transpose them.
        observation: observation of all environments.
    """
    inner = env.unwrapped
    if not isinstance(inner, GymnasiumVecEnv) or not inner.filler_next.any():
        return False
    last = inner.last_observation
    return last is not None and data_equivalence(_wrapped(env, last), observation, exact=True)


def _wrapped(env: VecEnv, observation: Any) -> Any:
    """Return an observation of the innermost environments as the wrappers around them return it."""
    if not isinstance(env, VecEnvWrapper):
        return observation
    inner = _wrapped(env.venv, observation)
    if isinstance(env, VecNormalize):
        return env.normalize_obs(inner)
    return env.transpose_observations(inner) if isinstance(env, VecTransposeImage) else inner
