"""State of the wrappers around a ``VecEnv``, and checks of ``VecNormalize``."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import (
    VecCheckNan,
    VecEnv,
    VecEnvWrapper,
    VecExtractDictObs,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

from rlxf.envs.return_to_go import ReturnToGo
from rlxf.utils.errors import EpisodeLostError

Place = tuple[object, str]
"""An object and the name of its attribute, a number or an array."""


def _normalize_places(wrapper: Any) -> list[Place]:
    obs_rms = wrapper.obs_rms if wrapper.norm_obs else {}
    statistics: list[RunningMeanStd] = list(obs_rms.values()) if isinstance(obs_rms, dict) else [obs_rms]
    parts = [(each, part) for each in [*statistics, wrapper.ret_rms] for part in ("mean", "var", "count")]
    return [(wrapper, "returns"), *parts]


def _stack_places(wrapper: Any) -> list[Place]:
    stacks = getattr(wrapper.stacked_obs, "sub_stacked_observations", {"": wrapper.stacked_obs})
    return [(stack, "stacked_obs") for stack in stacks.values()]


def _attributes(*names: str) -> Callable[[Any], list[Place]]:
    return lambda wrapper: [(wrapper, name) for name in names]


STATE_ATTRIBUTES: dict[type[VecEnvWrapper], Callable[[Any], list[Place]]] = {
    VecNormalize: _normalize_places,
    VecMonitor: _attributes("episode_returns", "episode_lengths", "episode_count"),
    VecFrameStack: _stack_places,
    VecTransposeImage: _attributes(),
    VecExtractDictObs: _attributes(),
    VecCheckNan: _attributes(),
    ReturnToGo: _attributes("_target", "_return_to_go", "_time_step", "_previous"),
}
"""Attributes in which each wrapper class, and its subclasses, keep state between steps."""


def vec_wrappers(env: VecEnv | None) -> Iterator[VecEnvWrapper]:
    """Yield the wrappers around ``env``, outermost first; none for None."""
    while isinstance(env, VecEnvWrapper):
        yield env
        env = env.venv


def wrapper_state(env: VecEnv) -> dict[str, np.ndarray]:
    """Return copies of the state that the known wrappers around ``env`` keep between steps, by name."""
    return {name: np.array(getattr(*place)) for name, place in _places(env)}


def load_wrapper_state(env: VecEnv, arrays: Mapping[str, np.ndarray]) -> None:
    """Load the arrays of `wrapper_state` into wrappers of the same classes.

    Raises:
        ValueError: if the wrappers or their spaces differ; the wrappers are then unchanged.
    """
    places = dict(_places(env))
    shapes = {name: np.shape(getattr(*place)) for name, place in places.items()}
    given = {name: array.shape for name, array in arrays.items()}
    if shapes != given:
        raise ValueError(
            f"the environment's wrappers have state of shapes {shapes}, but those of the run have "
            f"{given}: resume the run with the same wrappers and spaces"
        )
    for name, (holder, attribute) in places.items():
        old = getattr(holder, attribute)
        array = arrays[name]
        setattr(holder, attribute, array.copy() if isinstance(old, np.ndarray) else type(old)(array))


def _places(env: VecEnv) -> Iterator[tuple[str, Place]]:
    for depth, wrapper in enumerate(vec_wrappers(env)):
        for number, place in enumerate(_wrapper_places(wrapper)):
            yield f"{depth}.{type(wrapper).__name__}.{number}.{place[1]}", place


def _wrapper_places(wrapper: VecEnvWrapper) -> list[Place]:
    """Return the places of the nearest known class of a wrapper; a subclass may keep further state."""
    known = (STATE_ATTRIBUTES[base] for base in type(wrapper).__mro__ if base in STATE_ATTRIBUTES)
    return next(known, _attributes())(wrapper)


def check_known_wrappers(env: VecEnv) -> None:
    """Raise EpisodeLostError if the state of a wrapper class is not known, or not all of a subclass."""
    for wrapper in vec_wrappers(env):
        if type(wrapper) not in STATE_ATTRIBUTES:
            raise EpisodeLostError(
                f"the state that the wrapper {type(wrapper).__name__} keeps between steps is not known"
            )


def check_one_normalizer(env: VecEnv) -> None:
    """Raise ValueError if a ``VecNormalize`` is around another one.

    The functions of Stable-Baselines3 find only the outermost one, but evaluations need the statistics and
    the raw values of all.
    """
    if sum(isinstance(wrapper, VecNormalize) for wrapper in vec_wrappers(env)) > 1:
        raise ValueError(
            "the environments have a VecNormalize around another one, whose statistics and scaling an "
            "evaluation would not find: use one VecNormalize(norm_obs=..., norm_reward=...)"
        )


def check_no_normalized_images(env: VecEnv) -> None:
    """Raise ValueError if a ``VecNormalize`` normalizes an image in a Dict observation.

    Stable-Baselines3 then replaces the space of the image in the Dict of the environments, too, so their raw
    observations no longer fit. After this, an image has a float32 Box with three axes and the bounds
    +-clip_obs.
    """
    for normalizer in vec_wrappers(env):
        if not isinstance(normalizer, VecNormalize) or not normalizer.norm_obs:
            continue
        keys = normalizer.norm_obs_keys or []
        images = [key for key in keys if _is_normalized_image(normalizer, normalizer.observation_space[key])]  # type: ignore[index]
        if images:
            others = [key for key in keys if key not in images]
            remedy = f"norm_obs_keys={others}" if others else "norm_obs=False"
            raise ValueError(
                f"VecNormalize normalizes the image {images[0]!r} of a Dict observation, which changes the "
                f"space of the environments: create them again, and use VecNormalize(env, {remedy})"
            )


def _is_normalized_image(normalizer: VecNormalize, space: spaces.Space[Any]) -> bool:
    limit = normalizer.clip_obs
    return len(space.shape or ()) == 3 and space == spaces.Box(-limit, limit, space.shape, np.float32)
