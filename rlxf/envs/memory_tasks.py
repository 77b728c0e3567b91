"""Wrappers for the tasks of the ``memory`` extra, POPGym and MiniGrid."""

from collections.abc import Callable
from typing import NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import FilterObservation, FlattenObservation, TransformObservation


class Family(NamedTuple):
    """Family of environment ids: the module that registers them, and their default wrappers."""

    module: str
    view: Callable[[gymnasium.Env], gymnasium.Env]


def popgym_view(env: gymnasium.Env) -> gymnasium.Env:
    """Flatten a Tuple observation (POPGym Autoencode) to a vector, Discrete parts one-hot; keep others."""
    return FlattenObservation(env) if isinstance(env.observation_space, spaces.Tuple) else env


def minigrid_view(env: gymnasium.Env) -> gymnasium.Env:
    """Flatten the observation to a uint8 vector (4 + 7 * 7 * 20,): direction, then cells, all one-hot.

    MiniGrid's image holds codes of object, colour and state. These are categories, hence one-hot. The
    mission text is dropped. It carries no information if it never changes, as in all Memory tasks.

    Raises:
        TypeError: if the mission differs between episodes, because the task then depends on it.
    """
    from minigrid.wrappers import OneHotPartialObsWrapper

    _check_mission(env)
    flat = FlattenObservation(FilterObservation(OneHotPartialObsWrapper(env), ["direction", "image"]))
    bits = spaces.Box(0, 1, flat.observation_space.shape, np.uint8)
    return TransformObservation(flat, lambda observation: observation.astype(np.uint8), bits)


def _check_mission(env: gymnasium.Env) -> None:
    mission = env.observation_space["mission"]  # type: ignore[index]
    if any(len(words) > 1 for words in mission.ordered_placeholders or []):
        raise TypeError(
            f"the mission of {env} changes between episodes (for example {mission.sample()!r}), and text is "
            "not supported: pass a wrapper_class that encodes it as numbers"
        )


FAMILIES = {
    "popgym-": Family("popgym", popgym_view),
    "MiniGrid-": Family("minigrid", minigrid_view),
}


def family_of(env_id: str) -> Family | None:
    """Return the family whose prefix ``env_id`` has, or None."""
    return next((family for prefix, family in FAMILIES.items() if env_id.startswith(prefix)), None)
