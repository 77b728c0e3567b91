"""Comparison of an environment's version with that of the data."""

import warnings

from stable_baselines3.common.vec_env import VecEnv

from rlxf.envs.ids import env_id_of, is_other_version


def warn_of_other_version(data_env: str | None, env: VecEnv, warned: set[str]) -> None:
    """Warn once if an environment is that of the data in another version, e.g. Walker2d-v5 for Walker2d-v4.

    Versions may differ in dynamics and rewards even if their spaces are equal.

    Args:
        data_env: Gymnasium id of the environment of the data; None if it is unknown.
        env: the environments in which the agent acts.
        warned: ids that were warned of; the new one is added.
    """
    played = env_id_of(env)
    if data_env is None or played is None or played in warned or not is_other_version(data_env, played):
        return
    warned.add(played)
    warnings.warn(
        f"the data are from {data_env}, and the agent plays in {played}, another version of it: dynamics and "
        f"rewards may differ, so returns do not compare; use {data_env}, or data from {played}",
        stacklevel=4,
    )
