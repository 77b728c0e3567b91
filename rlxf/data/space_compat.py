"""Compatibility of spaces: between joined datasets, and between a dataset and an environment."""

from typing import Any, Protocol

import numpy as np
from gymnasium import spaces

from rlxf.data.encoders import observation_encoder
from rlxf.data.errors import DatasetError
from rlxf.data.space_utils import encoded_parts, is_image

Space = spaces.Space[Any]


class DatasetDescription(Protocol):
    """Protocol of a dataset or its description, such as `Trajectories`."""

    @property
    def dataset_ids(self) -> tuple[str, ...]:
        """Minari ids."""

    @property
    def observation_space(self) -> Space:
        """Observation space of the dataset."""

    @property
    def action_space(self) -> Space:
        """Action space of the dataset."""


def check_spaces_match(
    trajectories: DatasetDescription, observation_space: Space, action_space: Space
) -> None:
    """Check that the spaces of an environment match those of the dataset.

    Differences that do not change encoded observations are allowed: float precision, observation bounds,
    text, and the channel axis of an image that is the whole observation. Action bounds must be equal.

    Raises:
        DatasetError: if the spaces differ; the message describes the difference.
    """
    pairs = {
        "observation": observation_mismatch(trajectories.observation_space, observation_space),
        "action": action_mismatch(trajectories.action_space, action_space),
    }
    for kind, mismatch in pairs.items():
        if mismatch:
            raise DatasetError(
                f"the environment does not fit dataset {', '.join(trajectories.dataset_ids)}: {kind} space: "
                f"{mismatch}. Use the environment in which the dataset was recorded"
            )


def observation_mismatch(data: Space, other: Space) -> str:
    """Describe how an observation space differs from that of the data; empty if encoded rows are equal."""
    if isinstance(data, spaces.Dict) and isinstance(other, spaces.Dict):
        return _parts_mismatch(encoded_parts(data), encoded_parts(other))
    if isinstance(data, spaces.Tuple) and isinstance(other, spaces.Tuple):
        return _parts_mismatch(encoded_parts(data), encoded_parts(other))
    if is_image(data) and is_image(other):
        same = observation_encoder(data).shape == observation_encoder(other).shape
    else:
        same = _same_rows(data, other)
    return _describe(data, other, same)


def action_mismatch(data: Space, other: Space) -> str:
    """Describe how an action space differs from that of the data; empty if it does not."""
    if isinstance(data, spaces.Box) and isinstance(other, spaces.Box) and data.shape == other.shape:
        same = np.allclose(data.low, other.low) and np.allclose(data.high, other.high)
    else:
        same = _same_choices(data, other)
    return _describe(data, other, same)


def _parts_mismatch(data: dict[Any, Space], other: dict[Any, Space]) -> str:
    if data.keys() != other.keys():
        return f"expected the parts {list(data)}, got {list(other)}"
    mismatches = {key: _part_mismatch(data[key], other[key]) for key in data}
    return "; ".join(f"in {key!r}: {mismatch}" for key, mismatch in mismatches.items() if mismatch)


def _part_mismatch(data: Space, other: Space) -> str:
    """Describe the difference between parts; here the channel axes of images must agree, too."""
    if isinstance(data, spaces.Dict | spaces.Tuple):
        return observation_mismatch(data, other)
    return _describe(data, other, _same_rows(data, other))


def _same_rows(data: Space, other: Space) -> bool:
    if isinstance(data, spaces.Box) and isinstance(other, spaces.Box):
        return (is_image(data), data.shape) == (is_image(other), other.shape)
    return _same_choices(data, other)


def _same_choices(data: Space, other: Space) -> bool:
    """Return whether the spaces are equal, apart from the dtype of Discrete, which Minari does not save."""
    if isinstance(data, spaces.Discrete) and isinstance(other, spaces.Discrete):
        return (int(data.n), int(data.start)) == (int(other.n), int(other.start))
    return data == other


def _describe(data: Space, other: Space, same: bool) -> str:
    return "" if same else f"expected {data}, got {other}"
