"""Validation of the arrays of trajectories that were not loaded from a dataset."""

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from numpy.typing import DTypeLike, NDArray

from rlxf.data.encoders import action_encoder, has_image_extractor, observation_encoder
from rlxf.data.spaces import discrete_sizes, tolerant_bounds
from rlxf.utils.errors import DatasetError

if TYPE_CHECKING:
    from rlxf.data.trajectories import Trajectories

STEP_ARRAYS = {
    "observations": "observation",
    "actions": "action",
    "rewards": "reward",
    "return_to_go": "return to go",
}
"""Arrays with one row for each step, and the name of one row."""


def check_trajectories(data: "Trajectories") -> None:
    """Check dtypes, shapes and values of all arrays, without copies of large arrays.

    Raises:
        DatasetError: if an array is not as `rlxf.data.Trajectories` describes it. The message names the
            array, and the step of a wrong value.
        TypeError: if a space is not supported.
    """
    for name, (dtype, shape) in _forms(data).items():
        _check_form(name, getattr(data, name), np.dtype(dtype), shape)
    _check_offsets(data.offsets, data.steps)
    for name in STEP_ARRAYS:
        _check_finite(data, name)
    _check_moments(data)
    _check_actions(data)


def _forms(data: "Trajectories") -> dict[str, tuple[DTypeLike, tuple[int, ...]]]:
    """Return the dtype and the shape of each array; there are as many steps as rewards."""
    steps, episodes = np.size(data.rewards), np.size(data.offsets) - 1
    observe, act = observation_encoder(data.observation_space), action_encoder(data.action_space)
    moments = {} if has_image_extractor(observe.shape) else _given_moments(data)
    return {
        "rewards": (np.float32, (steps,)),
        "return_to_go": (np.float32, (steps,)),
        "observations": (observe.dtype, (steps, *observe.shape)),
        "actions": (act.dtype, (steps, *act.shape)),
        "offsets": (np.int64, (episodes + 1,)),
        "terminated": (np.bool_, (episodes,)),
        "truncated": (np.bool_, (episodes,)),
        **{name: (np.float32, observe.shape) for name in moments},
    }


def _given_moments(data: "Trajectories") -> dict[str, NDArray[np.float32]]:
    moments = {"observation_mean": data.observation_mean, "observation_std": data.observation_std}
    return {name: array for name, array in moments.items() if array is not None}


def _check_form(name: str, array: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Raise DatasetError unless an array has a dtype and a shape."""
    if not isinstance(array, np.ndarray):
        raise DatasetError(f"{name} of the trajectories must be a NumPy array, got {type(array).__name__}")
    if (array.dtype, array.shape) != (dtype, shape):
        same_shape = array.shape == shape
        remedy = f"convert it with {name}.astype(np.{dtype.name})" if same_shape else "correct its shape"
        raise DatasetError(
            f"{name} of the trajectories must be {dtype} of shape {shape}, as their spaces, rewards and "
            f"offsets require, got {array.dtype} of shape {array.shape}; {remedy}"
        )


def _check_offsets(offsets: NDArray[np.int64], steps: int) -> None:
    """Raise DatasetError unless offsets divide the steps into episodes of at least one step."""
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != steps or (np.diff(offsets) < 1).any():
        raise DatasetError(
            f"offsets of the trajectories must ascend from 0 to the number of steps, {steps:,}, with at "
            f"least one step between two of them, got {np.array2string(offsets, threshold=6)}"
        )


def _check_finite(data: "Trajectories", name: str) -> None:
    """Raise DatasetError with the first step at which an array of floats is NaN or infinite."""
    array = getattr(data, name)
    if array.dtype.kind != "f" or _all_finite(array):
        return
    rows = np.isfinite(array.reshape(data.steps, -1))
    step = int(np.argmin(rows.all(axis=1)))
    value = array.reshape(data.steps, -1)[step][~rows[step]][0]
    source = "rewards" if name == "return_to_go" else name
    raise DatasetError(
        f"the {STEP_ARRAYS[name]} of step {step} of the trajectories is {value}; correct the {source} of "
        f"that episode"
    )


def _all_finite(array: NDArray[Any]) -> bool:
    """Return whether all numbers are finite; minimum and maximum of an array with a NaN are NaN."""
    return not array.size or bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def _check_moments(data: "Trajectories") -> None:
    """Raise DatasetError unless mean and standard deviation, where given, can normalize observations."""
    if has_image_extractor(data.encoder.shape):
        return
    for name, array in _given_moments(data).items():
        valid = np.isfinite(array) & ((array > 0) | (name == "observation_mean"))
        if not valid.all():
            allowed = "finite" if name == "observation_mean" else "finite and above 0"
            raise DatasetError(
                f"{name} of the trajectories must be {allowed}, got {array[~valid][0]} for feature "
                f"{int(np.argmin(valid))}; compute it with Trajectories.with_observations(observations)"
            )


def _check_actions(data: "Trajectories") -> None:
    """Raise DatasetError with the first step whose action is not in the action space."""
    actions = data.actions.reshape(data.steps, -1)
    low, high = _action_bounds(data.action_space)
    if (actions.min(axis=0) >= low).all() and (actions.max(axis=0) <= high).all():
        return
    step = int(np.argmin(((actions >= low) & (actions <= high)).all(axis=1)))
    counted = "" if isinstance(data.action_space, spaces.Box) else ", counted from 0,"
    raise DatasetError(
        f"the action of step {step} of the trajectories{counted} is {data.actions[step].tolist()}, outside "
        f"of {data.action_space}; correct actions or action_space"
    )


def _action_bounds(space: spaces.Space[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the smallest and the largest number of each component of encoded actions, (A,)."""
    if isinstance(space, spaces.Box):
        low, high = tolerant_bounds(space)
        return low.ravel(), high.ravel()
    sizes = discrete_sizes(space)  # type: ignore[arg-type]  # action_encoder accepts no other space
    return np.zeros_like(sizes), sizes - 1
