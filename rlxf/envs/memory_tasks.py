"""Tasks of the ``memory`` extra, POPGym and MiniGrid, made readable for a policy."""

from collections.abc import Callable
from typing import NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import FilterObservation, FlattenObservation, TransformObservation


class Family(NamedTuple):
    """The module that registers a family of ids, and the view its environments get unless told otherwise."""

    module: str
    view: Callable[[gymnasium.Env], gymnasium.Env]


def popgym_view(env: gymnasium.Env) -> gymnasium.Env:
    """Tuple observations (POPGym Autoencode) become one vector, Discrete parts one-hot; others stay."""
    return FlattenObservation(env) if isinstance(env.observation_space, spaces.Tuple) else env


def minigrid_view(env: gymnasium.Env) -> gymnasium.Env:
    """One vector, uint8 (4 + 7 * 7 * 20,): the direction, then each cell's parts, all one-hot.

    MiniGrid's image holds the codes of object, colour and state: names, not brightnesses, hence one-hot.
    The mission text is dropped, which loses nothing where it never changes (all Memory tasks).

    Raises:
        TypeError: if the mission differs between episodes, so that dropping it would hide the task.
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
            f"the mission of {env} changes between episodes (such as {mission.sample()!r}), and text is not "
            "supported: pass a wrapper_class that turns it into numbers"
        )


FAMILIES = {
    "popgym-": Family("popgym", popgym_view),
    "MiniGrid-": Family("minigrid", minigrid_view),
}


def family_of(env_id: str) -> Family | None:
    """The family whose prefix ``env_id`` has, None if it is none of them."""
    return next((family for prefix, family in FAMILIES.items() if env_id.startswith(prefix)), None)
