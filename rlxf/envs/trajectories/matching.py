"""Whether spaces fit each other: those of joined datasets, and of a dataset and an environment."""

from typing import Any, Protocol

import numpy as np
from gymnasium import spaces

from rlxf.envs.trajectories.encoders import ImageEncoder, observation_encoder
from rlxf.envs.trajectories.errors import DatasetError

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

    Floats may differ in precision and observations in bounds, and an image may have its channels first or
    last: the encoded observations are alike. The bounds of actions must agree.

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
    if isinstance(data, spaces.Dict | spaces.Tuple) and type(data) is type(other):
        return _parts_mismatch(_parts(data), _parts(other))
    if isinstance(data, spaces.Box) and isinstance(other, spaces.Box):
        return "" if _form(data) == _form(other) else f"the data have {data}, this has {other}"
    return "" if data == other else f"the data have {data}, this has {other}"


def action_mismatch(data: Space, other: Space) -> str:
    """How an action space differs from that of the data, in words; empty if actions mean the same."""
    if isinstance(data, spaces.Box) and isinstance(other, spaces.Box) and data.shape == other.shape:
        same = np.allclose(data.low, other.low) and np.allclose(data.high, other.high)
    else:
        same = data == other
    return "" if same else f"the data have {data}, this has {other}"


def _parts_mismatch(data: dict[Any, Space], other: dict[Any, Space]) -> str:
    if data.keys() != other.keys():
        return f"the data have the parts {list(data)}, this has {list(other)}"
    found = {key: observation_mismatch(data[key], other[key]) for key in data}
    return "; ".join(f"in {key!r}: {mismatch}" for key, mismatch in found.items() if mismatch)


def _parts(space: Any) -> dict[Any, Space]:
    return dict(space.spaces) if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))


def _form(box: spaces.Box[Any]) -> tuple[Any, ...]:
    encoder = observation_encoder(box)
    return (type(encoder), encoder.shape if isinstance(encoder, ImageEncoder) else box.shape)
