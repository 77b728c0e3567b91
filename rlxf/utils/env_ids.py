"""Comparison of Gymnasium ids, without a look-up of the environments."""

import gymnasium
from gymnasium.envs.registration import parse_env_id


def is_other_version(one: str, other: str) -> bool:
    """Return whether two ids differ only in their version, as Walker2d-v4 and Walker2d-v5 do.

    The result is False if one of them is not a Gymnasium id, which files may contain.
    """
    try:
        return one != other and parse_env_id(one)[:-1] == parse_env_id(other)[:-1]
    except (gymnasium.error.Error, ValueError):  # ValueError: a version of more digits than Python reads
        return False
