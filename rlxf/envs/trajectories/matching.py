"""Whether spaces fit each other: those of joined datasets, and of a dataset and an environment."""

from typing import Any, Protocol

import numpy as np
from gymnasium import spaces

from rlxf.envs.trajectories.encoders import observation_encoder
from rlxf.envs.trajectories.errors import DatasetError
from rlxf.envs.trajectories.parts import is_image, kept_parts

Space = spaces.Space[Any]


class Recorded(Protocol):
    """Data, such as `Trajectories`, or what is known of them."""

    @property
    def dataset_ids(self) -> tuple[str, ...]:
        """Minari ids."""

    @property
    def observation_space(self) -> Space:
        """Of the data."""

    @property
    def action_space(self) -> Space:
        """Of the data."""


def check_fits(trajectories: Recorded, observation_space: Space, action_space: Space) -> None:
    """Refuse an environment whose spaces are not those of the data.

    Floats may differ in precision and observations in bounds, an image that is the whole observation may have
    its channels first or last, and text does not count: the encoded observations are alike. The bounds of
    actions must agree.

    Raises:
        DatasetError: that says where they differ.
    """
    pairs = {
        "observation": observation_mismatch(trajectories.observation_space, observation_space),
        "action": action_mismatch(trajectories.action_space, action_space),
    }
    for kind, mismatch in pairs.items():
        if mismatch:
            raise DatasetError(
                f"the environment does not fit dataset {', '.join(trajectories.dataset_ids)}: {kind} space: "
                f"{mismatch}. Use the environment that the data were recorded in"
            )


def observation_mismatch(data: Space, other: Space) -> str:
    """How an observation space differs from that of the data, in words; empty if encoded rows are alike."""
    if isinstance(data, spaces.Dict) and isinstance(other, spaces.Dict):
        return _parts_mismatch(kept_parts(data), kept_parts(other))
    if isinstance(data, spaces.Tuple) and isinstance(other, spaces.Tuple):
        return _parts_mismatch(kept_parts(data), kept_parts(other))
    if is_image(data) and is_image(other):
        same = observation_encoder(data).shape == observation_encoder(other).shape
    else:
        same = _flattened_alike(data, other)
    return _told_apart(data, other, same)


def action_mismatch(data: Space, other: Space) -> str:
    """How an action space differs from that of the data, in words; empty if actions mean the same."""
    if isinstance(data, spaces.Box) and isinstance(other, spaces.Box) and data.shape == other.shape:
        same = np.allclose(data.low, other.low) and np.allclose(data.high, other.high)
    else:
        same = _same_choices(data, other)
    return _told_apart(data, other, same)


def _parts_mismatch(data: dict[Any, Space], other: dict[Any, Space]) -> str:
    if data.keys() != other.keys():
        return f"the data have the parts {list(data)}, this has {list(other)}"
    found = {key: _part_mismatch(data[key], other[key]) for key in data}
    return "; ".join(f"in {key!r}: {mismatch}" for key, mismatch in found.items() if mismatch)


def _part_mismatch(data: Space, other: Space) -> str:
    """As `observation_mismatch`, but for an image: in a row its numbers come as they stand."""
    if isinstance(data, spaces.Dict | spaces.Tuple):
        return observation_mismatch(data, other)
    return _told_apart(data, other, _flattened_alike(data, other))


def _flattened_alike(data: Space, other: Space) -> bool:
    if isinstance(data, spaces.Box) and isinstance(other, spaces.Box):
        return (is_image(data), data.shape) == (is_image(other), other.shape)
    return _same_choices(data, other)


def _same_choices(data: Space, other: Space) -> bool:
    """Whether the spaces are equal, but for the type of their numbers, which Minari does not keep."""
    if isinstance(data, spaces.Discrete) and isinstance(other, spaces.Discrete):
        return (int(data.n), int(data.start)) == (int(other.n), int(other.start))
    return data == other


def _told_apart(data: Space, other: Space, same: bool) -> str:
    return "" if same else f"the data have {data}, this has {other}"
