"""Comparison of an environment's version with that of the data."""

import warnings

from stable_baselines3.common.vec_env import VecEnv

from rlxf.envs.ids import env_id_of, is_other_version


def warn_of_other_version(data_env: str | None, env: VecEnv, warned: set[str]) -> None:
    """Warn once if an environment is another version of that of the data, e.g. Walker2d-v5 for Walker2d-v4.

    Versions may differ in dynamics and rewards even if their spaces are equal.

    Args:
        data_env: Gymnasium id of the environment of the data; None if it is unknown.
        env: the environments in which the agent acts.
        warned: ids for which a warning was given; the new id is added.
    """
    env_id = env_id_of(env)
    if data_env is None or env_id is None or env_id in warned or not is_other_version(data_env, env_id):
        return
    warned.add(env_id)
    warnings.warn(
        f"the data are from {data_env}, but the agent acts in {env_id}, another version of it: dynamics and "
        f"rewards may differ, so returns are not comparable; use {data_env}, or data from {env_id}",
        stacklevel=4,
    )
