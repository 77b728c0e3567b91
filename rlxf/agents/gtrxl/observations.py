"""Batches of observations as trees: an array or tensor, or the entries of Dict observations; their checks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from rlxf.data.spaces import DiscreteSpace, Space, parts_by_key
from rlxf.envs.step_checks import observation_fault
from rlxf.utils.errors import NumericalError


def map_obs(function: Callable[..., Any], obs: Any, *others: Any) -> Any:
    """Apply a function to observations, or to each entry of Dict observations."""
    if isinstance(obs, dict):
        return {key: function(x, *(other[key] for other in others)) for key, x in obs.items()}
    return function(obs, *others)


def obs_tensors(obs: PyTorchObs) -> list[Tensor]:
    """Return observations as a list of tensors, those of a dict in the order of its sorted keys."""
    return [obs[key] for key in sorted(obs)] if isinstance(obs, dict) else [obs]


def named_obs(name: str, obs: Any) -> dict[str, Tensor]:
    """Return the tensor of observations by ``name``, or those of the entries by ``name[key]``."""
    if isinstance(obs, dict):
        return {f"{name}[{key}]": torch.as_tensor(part) for key, part in obs.items()}
    return {name: torch.as_tensor(obs)}


def obs_from_named(name: str, values: Mapping[str, Any]) -> Any:
    """Return the observations of `named_obs`."""
    if name in values:
        return values[name]
    start = f"{name}["
    return {key[len(start) : -1]: value for key, value in values.items() if key.startswith(start)}


def as_array(x: np.ndarray | Tensor) -> np.ndarray:
    """Return an array, or a tensor as an array; bfloat16, which NumPy lacks, becomes float32."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


def as_step_input(x: Tensor) -> Tensor:
    """Return a contiguous tensor, real numbers as float32; a compiled step does not check its arguments.

    The network itself converts real numbers to float32.
    """
    return (x.float() if x.is_floating_point() else x).contiguous()


def normalized_space(space: spaces.Space[Any], normalizer: VecNormalize | None) -> spaces.Space[Any]:
    """Return the space of the observations that a ``VecNormalize`` returns; it keeps that of the environment.

    The Box spaces that it normalizes become float32.
    """
    if normalizer is None or not normalizer.norm_obs:
        return space
    if not isinstance(space, spaces.Dict):
        return spaces.Box(-np.inf, np.inf, space.shape, np.float32)
    keys = normalizer.norm_obs_keys or ()
    parts = {key: normalized_space(part, normalizer) if key in keys else part for key, part in space.items()}
    return spaces.Dict(parts)


def whole_number_parts(space: Space) -> dict[str | None, Space]:
    """Return the parts of a space, as `parts_by_key`, whose values are choices, bits or pixels."""
    parts = parts_by_key(space).items()
    return {key: part for key, part in parts if isinstance(part, DiscreteSpace) or is_image_space(part)}


def check_whole_numbers(parts: Mapping[str | None, Space], observation: Any) -> None:
    """Raise ValueError if parts of observations, as `whole_number_parts`, hold fractions or wrong values.

    Otherwise the network would round 2.9 down, divide pixels from 0 to 1 by 255, and accept any number as a
    bit or a pixel. Choices out of range are found where they are encoded.
    """
    for key, space in parts.items():
        known = key is None or (isinstance(observation, dict) and key in observation)
        values = np.asarray(0 if not known else observation if key is None else observation[key])
        if values.dtype.kind not in "iuf":
            continue
        if len(wrong := values[_wrong_numbers(space, values)]):
            advice = "; pass pixels from 0 to 255" if is_image_space(space) else ""
            raise ValueError(f"the observation{_part(key)} holds {wrong[0]}, no value of {space}{advice}")


def _wrong_numbers(space: Space, values: np.ndarray) -> Any:
    """Return which finite numbers are fractions, no bits of a MultiBinary or no pixels of an image."""
    wrong: Any = np.False_
    if values.dtype.kind == "f":
        wrong = values != np.floor(values)
    if isinstance(space, spaces.MultiBinary):
        wrong = wrong | (values < 0) | (values > 1)
    elif values.dtype != np.uint8 and is_image_space(space):
        wrong = wrong | (values < 0) | (values > 255)
    return wrong & np.isfinite(values) if np.any(wrong) else np.False_


@contextmanager
def named_faults(space: Space, observation: Any) -> Iterator[None]:
    """Context manager that replaces an error by one that names the fault of an observation, or of a batch.

    Raises:
        NumericalError: if the error is one, and the observation has a fault.
        ValueError: for other errors, if the observation has a fault.
    """
    try:
        yield
    except Exception as error:
        fault = _observation_fault(space, observation)
        if fault is None:
            raise
        kind = NumericalError if isinstance(error, NumericalError) else ValueError
        raise kind(f"{fault}; pass one observation of the space of the training, or a batch") from error


def _observation_fault(space: Space, observation: Any) -> str | None:
    """Describe how one observation or a batch does not fit the space; None if it does."""
    parts = parts_by_key(space)
    if isinstance(space, spaces.Dict):
        if not isinstance(observation, Mapping):
            return f"the observation {observation_fault(space, observation)}"
        known = ", ".join(map(repr, parts))
        if missing := [key for key in parts if key not in observation]:
            return f"the observation lacks the part {missing[0]!r}; its space has {known}"
        if unknown := [key for key in observation if key not in parts]:
            return f"the observation has the unknown part {unknown[0]!r}; its space has {known}"
    for key, part in parts.items():
        if fault := _part_fault(part, observation if key is None else observation[key]):
            return f"the observation{_part(key)}{fault}"
    return None if not isinstance(space, spaces.Dict) else _batch_fault(parts, observation)


def _batch_fault(parts: Mapping[Any, Space], observation: Mapping[Any, Any]) -> str | None:
    """Describe parts of a Dict with different batch sizes; None if they are equal."""
    shapes = {key: np.shape(observation[key]) for key in parts}
    is_batch = {key: len(shapes[key]) > len(part.shape or ()) for key, part in parts.items()}
    sizes = {key: f"a batch of {shape[0]}" if is_batch[key] else "one" for key, shape in shapes.items()}
    if len(set(sizes.values())) == 1:
        return None
    listed = ", ".join(f"{key!r}: {size}" for key, size in sizes.items())
    return f"the observation has parts of different batch sizes, {listed}"


def _part_fault(space: Space, values: Any) -> str | None:
    """Describe the first fault in one value of a space or a batch, as the rest of a sentence."""
    shape = space.shape or ()
    array = np.asarray(values)
    rows = list(array) if array.ndim > len(shape) else [array]
    for number, row in enumerate(rows):
        has_channels_last = is_image_space(space) and row.shape == (*shape[1:], shape[0])
        given = np.moveaxis(row, -1, 0) if has_channels_last else row
        fault = _not_finite(row) or observation_fault(space, _as_predicted(space, given))
        if fault is not None:
            return f" {fault}" if rows[0] is array else f" {number} of the batch {fault}"
    return None


def _as_predicted(space: Space, row: np.ndarray) -> np.ndarray:
    """Return values with the dtype of a space of whole numbers, to which ``predict`` converts them."""
    is_whole = space.dtype is not None and space.dtype.kind in "biu"
    return row.astype(space.dtype) if is_whole and row.dtype.kind in "biuf" else row


def _not_finite(row: np.ndarray) -> str | None:
    if row.dtype.kind != "f" or np.isfinite(row).all():
        return None
    index = tuple(np.argwhere(~np.isfinite(row))[0].tolist())
    return f"is {row[index]} at index {list(index)}"


def _part(key: str | None) -> str:
    return "" if key is None else f" {key!r}"
