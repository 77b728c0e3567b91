"""Checks of observation and action spaces, and functions that batch and split observations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs
from stable_baselines3.common.vec_env.util import dict_to_obs, obs_space_info

from rlxf.data.spaces import FLAT, encoded_parts, is_text, is_text_only, leaves
from rlxf.utils.errors import FaultyEnvironmentError

Space = spaces.Space

_ALLOWED = (
    "observations: Box (vector, or image uint8), Discrete, MultiDiscrete, MultiBinary, or a Dict of these; "
    "actions: Box, Discrete, MultiDiscrete, MultiBinary"
)
_REMEDY = (
    "wrap the environment, for example with gymnasium.wrappers.FlattenObservation; for a task of MiniGrid or "
    "POPGym, pass the id or rlxf.envs.make_vec_env(id, n_envs), which encode its observation"
)
_ACTION_REMEDY = "wrap the environment, for example with gymnasium.wrappers.TransformAction"
_PLAYABLE = "Box, Discrete, MultiDiscrete and MultiBinary"


def check_has_spaces(env: Any) -> None:
    """Raise TypeError unless an environment has an ``observation_space`` and an ``action_space``."""
    for name in ("observation_space", "action_space"):
        if getattr(env, name, None) is None:
            raise TypeError(
                f"the environment {getattr(env, 'unwrapped', env)} has no {name}: set it to a space of "
                f"gymnasium.spaces, for example in __init__"
            )


def check_playable(observation_space: Space, action_space: Space) -> None:
    """Raise unless some agent of this package supports the spaces.

    Allowed observations: Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these, nested to
    any depth. They may also contain text, which the agents ignore. Allowed actions: the first four.
    `GTrXLPPO` supports fewer spaces (`check_spaces`), and a `DecisionTransformer` those of its data.

    Raises:
        TypeError: with the unsupported part and the allowed spaces.
    """
    if is_text_only(observation_space):
        raise TypeError(f"observation space {observation_space} has only text parts, and agents ignore text")
    for where, part in leaves(observation_space, "observation space"):
        if not (isinstance(part, FLAT) or is_text(part)):
            raise TypeError(
                f"{where} {part} is not supported. Allowed are {_PLAYABLE}, and Dict and Tuple of these, "
                f"which may also contain text; remove the part with a wrapper"
            )
    if not isinstance(action_space, FLAT):
        raise TypeError(f"action space {action_space} is not supported. Allowed are {_PLAYABLE}")


def check_spaces(observation_space: Space, action_space: Space) -> None:
    """Raise unless the policies of `GTrXLPPO` support the spaces.

    Allowed observations: Box, Discrete, MultiDiscrete, MultiBinary, and a Dict of these without nested
    Dicts. Allowed actions: the same without Dict; a Box of actions needs finite bounds and a float dtype.
    No space may be empty, and the keys of a Dict are text. As in Stable-Baselines3, MultiDiscrete and
    MultiBinary have one axis, and discrete observations start at 0; discrete actions may start at any
    number.

    Raises:
        TypeError: with the space, its fault and the allowed spaces.
    """
    parts = (
        observation_space.spaces if isinstance(observation_space, spaces.Dict) else {"": observation_space}
    )
    _check("observation space", observation_space, _keys_fault(list(parts)))
    for key, space in parts.items():
        where = "observation space" + (f" {key!r}" if key else "")
        _check(where, space, _flat_fault(space) or _start_fault(space))
    fault = _flat_fault(action_space) or _action_fault(action_space)
    _check("action space", action_space, fault, _ACTION_REMEDY)


def _check(where: str, space: Space, fault: str | None, remedy: str = _REMEDY) -> None:
    if fault:
        raise TypeError(f"{where} {space} {fault}. Allowed are {_ALLOWED}. Otherwise {remedy}")


def _keys_fault(keys: Sequence[Any]) -> str | None:
    other = [key for key in keys if not isinstance(key, str)]
    if other:
        return f"has the key {other[0]!r} ({type(other[0]).__name__}): keys must be text"
    return None if keys else "is empty"


def _flat_fault(space: Space) -> str | None:
    if not isinstance(space, FLAT):
        return f"is a {type(space).__name__}, which is not supported"
    axes = len(space.shape or ())
    if axes > 1 and not isinstance(space, spaces.Box):
        return f"has {axes} axes, not one"
    if axes == 0 and isinstance(space, spaces.Box):
        return "has no axis"
    return "is empty" if 0 in (space.shape or ()) else None


def _start_fault(space: Space) -> str | None:
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and (space.start != 0).any():
        return f"starts at {space.start}, not at 0"
    return None


def _action_fault(space: Space) -> str | None:
    if not isinstance(space, spaces.Box):
        return None
    if not space.is_bounded():
        return "has no finite bounds: declare the range of useful actions, Box(low, high)"
    return None if space.dtype.kind == "f" else f"holds {space.dtype}, not real numbers: use MultiDiscrete"


def with_zero(action_space: Space) -> Space:
    """Return the space, or a Box extended to contain the zeros at the start of an episode."""
    if not isinstance(action_space, spaces.Box) or action_space.contains(np.zeros_like(action_space.low)):
        return action_space
    low, high = np.minimum(action_space.low, 0), np.maximum(action_space.high, 0)
    return spaces.Box(low, high, dtype=action_space.dtype)


def row_of(batch: Any, i: int) -> Any:
    """Return a copy of row i of a batch of observations: an array, a string, or a dict or tuple of these."""
    return map_parts(batch, lambda part: _copy(part[i]))


def writable_arrays(observations: Any) -> Any:
    """Return observations whose arrays are writable ones of NumPy; only others, e.g. of JAX, are copied."""
    return map_parts(observations, _writable)


def _writable(part: Any) -> Any:
    if isinstance(part, np.ndarray):
        return part if part.flags.writeable else part.copy()
    return np.array(part) if hasattr(part, "__array__") else part


def numbers_in_space(space: Space | None, observation: Any) -> Any:
    """Return an observation whose arrays of Python objects are converted to the dtype of their space.

    Raises:
        FaultyEnvironmentError: if an object cannot be converted.
    """
    if isinstance(space, spaces.Dict) and isinstance(observation, Mapping):
        return {key: numbers_in_space(space.spaces.get(key), part) for key, part in observation.items()}
    if isinstance(space, spaces.Tuple) and isinstance(observation, tuple):
        return tuple(map(numbers_in_space, space, observation))
    if not isinstance(space, FLAT) or getattr(observation, "dtype", None) != np.object_:
        return observation
    try:
        return np.array(observation.tolist(), dtype=space.dtype)
    except (TypeError, ValueError) as error:
        raise FaultyEnvironmentError(
            f"an observation must hold numbers of its space {space}, got {observation!r}; correct the "
            f"environment, or wrap it"
        ) from error


def rows_of(batch: Any, rows: NDArray[np.int64]) -> Any:
    """Return the selected rows (N,) of a batch of observations, nested like the batch."""
    return map_parts(
        batch, lambda part: tuple(part[i] for i in rows) if isinstance(part, tuple) else part[rows]
    )


def batch_of_one(observation: Any) -> Any:
    """Return an observation as a batch with one row, arrays (1, ...), nested like the observation."""
    return map_parts(observation, lambda part: np.asarray(part)[None])


def concatenate_observations(rows: Sequence[Any]) -> VecEnvObs:
    """Concatenate the observations (1, ...) of N environments to a batch (N, ...)."""
    if isinstance(rows[0], dict):
        return {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}
    if isinstance(rows[0], tuple):
        return tuple(np.concatenate(part) for part in zip(*rows, strict=True))
    return np.concatenate(rows)


def observation_parts(observation: VecEnvObs) -> dict[str, np.ndarray]:
    """Return the arrays of an observation by the key of a Dict, the index in a Tuple, or ""."""
    if isinstance(observation, dict | tuple):
        items = observation.items() if isinstance(observation, dict) else enumerate(observation)
        return {str(key): part for key, part in items}
    return {"": observation}


def observation_from_parts(space: spaces.Space[Any], parts: Mapping[str, np.ndarray]) -> VecEnvObs:
    """Return the observation of a space from its `observation_parts`."""
    keys, *_ = obs_space_info(space)
    return dict_to_obs(space, {key: parts["" if key is None else str(key)] for key in keys})


def nested_parts(space: Space, observation: Any, name: str) -> dict[str, np.ndarray]:
    """Return the arrays of an observation by name: ``name.key.key`` for a part of a nested Dict or Tuple.

    Text parts, which agents ignore, are left out.
    """
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return {name: np.asarray(observation)}
    named = (nested_parts(p, observation[key], f"{name}.{key}") for key, p in encoded_parts(space).items())
    return {each: part for parts in named for each, part in parts.items()}


def observation_from_nested_parts(space: Space, parts: Mapping[str, np.ndarray], name: str) -> Any:
    """Return the observation of a space from its `nested_parts`; the text parts of a Tuple become None."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return parts[name]
    inner = encoded_parts(space).items()
    found = {key: observation_from_nested_parts(part, parts, f"{name}.{key}") for key, part in inner}
    return found if isinstance(space, spaces.Dict) else tuple(map(found.get, range(len(space.spaces))))


def map_parts(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to each part of a batch. Gymnasium batches strings as a tuple of strings, one part."""
    if isinstance(batch, dict):
        return {key: map_parts(part, function) for key, part in batch.items()}
    if isinstance(batch, tuple) and not all(isinstance(entry, str) for entry in batch):
        return tuple(map_parts(part, function) for part in batch)
    return function(batch)


def _copy(row: Any) -> Any:
    if isinstance(row, dict):
        return {key: _copy(part) for key, part in row.items()}
    if isinstance(row, tuple):
        return tuple(map(_copy, row))
    return row if isinstance(row, str) else np.array(row)
