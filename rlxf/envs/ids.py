"""Gymnasium specs and ids of vector environments."""

from gymnasium.envs.registration import EnvSpec, parse_env_id
from stable_baselines3.common.vec_env import VecEnv


def spec_of(env: VecEnv) -> EnvSpec | None:
    """Return the Gymnasium spec of the first environment; None if it was not created from an id."""
    try:
        spec: EnvSpec | None = env.get_attr("spec", 0)[0]
    except (AttributeError, NotImplementedError):  # not a Gymnasium environment
        return None
    return spec


def env_id_of(env: VecEnv) -> str | None:
    """Return the Gymnasium id of the first environment; None if it was not created from an id."""
    return getattr(spec_of(env), "id", None)


def is_other_version(one: str, other: str) -> bool:
    """Return whether two ids differ only in their version, as Walker2d-v4 and Walker2d-v5 do."""
    *name, version = parse_env_id(one)
    *other_name, other_version = parse_env_id(other)
    return name == other_name and version != other_version
