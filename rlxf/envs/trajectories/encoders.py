"""How observations and actions become rows of arrays: in datasets, and while acting."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from minari.dataset.minari_storage import is_image_space as is_minari_image
from numpy.typing import DTypeLike, NDArray
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first

from rlxf.envs.trajectories.errors import RowError
from rlxf.envs.trajectories.flatten import counted, flatten_rows, unflatten_rows

Space = spaces.Space[Any]


class Encoder(Protocol):
    """What an encoder offers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row."""

    @property
    def dtype(self) -> DTypeLike:
        """Type of the numbers."""

    def __call__(self, values: Any) -> NDArray[Any]:
        """Values of the space, n of them along the first axis of each array -> ``(n, *shape)``.

        Raises:
            RowError: if a value is NaN or infinite in float32, or outside of a discrete space.
        """


def observation_encoder(space: Space) -> "VectorEncoder | ImageEncoder":
    """The encoder of observations.

    - **Image**: a uint8 Box from 0 to 255 with three axes, channels first or last (told as in
      Stable-Baselines3: the smallest axis), or with two axes of at least 32: `ImageEncoder`.
    - **Everything else**: `VectorEncoder`.

    Raises:
        TypeError: if a part is of another class than Box, Discrete, MultiDiscrete, MultiBinary, Dict and
            Tuple, or is an image beside other parts.
    """
    if is_image_space(space) or is_minari_image(space):
        assert isinstance(space, spaces.Box)
        return ImageEncoder(space)
    _check_vector(space, "observation space")
    return VectorEncoder(space)


def action_encoder(space: Space) -> "VectorEncoder | ChoiceEncoder":
    """The encoder of actions: `VectorEncoder` for Box, `ChoiceEncoder` for Discrete and MultiDiscrete.

    Raises:
        TypeError: if the space is of another class, does not count from 0, or is a MultiDiscrete of more
            than one axis.
    """
    if isinstance(space, spaces.Box):
        return VectorEncoder(space)
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        raise TypeError(f"action space {space}: allowed are Box, Discrete and MultiDiscrete")
    if np.any(space.start != 0) or len(space.shape or ()) > 1:
        raise TypeError(f"action space {space}: it must count from 0 and have at most one axis")
    return ChoiceEncoder(space)


@dataclass(frozen=True)
class VectorEncoder:
    """float32 (D,): the value flattened by Gymnasium's rule, see `flatten_rows`.

    Numbers stay as they are, Discrete becomes one-hot, Dict and Tuple are joined part by part.
    """

    space: Space

    @property
    def shape(self) -> tuple[int, ...]:
        """(D,)"""
        return (spaces.flatdim(self.space),)

    @property
    def dtype(self) -> DTypeLike:
        """float32"""
        return np.float32

    def __call__(self, values: Any) -> NDArray[np.float32]:
        """See `Encoder`; (n, D)."""
        rows = flatten_rows(self.space, values)
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            row = int(np.argmin(finite))
            column = int(np.argmin(np.isfinite(rows[row])))
            raise RowError(row, f"is {rows[row, column]} at index {column}")
        return rows

    def back(self, rows: NDArray[np.float32]) -> Any:
        """Rows (n, D) as values of the space, n of them along the first axis of each array."""
        return unflatten_rows(self.space, rows)


@dataclass(frozen=True)
class ImageEncoder:
    """uint8 (C, H, W): the image, channels first as in Stable-Baselines3; without channels C is 1."""

    space: spaces.Box[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W)"""
        return self._channels_first(np.empty((1, *self.space.shape), np.uint8)).shape[1:]

    @property
    def dtype(self) -> DTypeLike:
        """uint8"""
        return np.uint8

    def __call__(self, values: Any) -> NDArray[np.uint8]:
        """See `Encoder`; (n, C, H, W)."""
        return self._channels_first(np.asarray(values, np.uint8).reshape(-1, *self.space.shape))

    def back(self, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Rows (n, C, H, W) as images of the space, (n, ...)."""
        if len(self.space.shape) == 2:
            return rows[:, 0]
        return rows if is_image_space_channels_first(self.space) else np.moveaxis(rows, 1, -1)

    def _channels_first(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if images.ndim == 3:
            return images[:, None]
        if is_image_space_channels_first(self.space):
            return images
        return np.moveaxis(images, -1, 1)


@dataclass(frozen=True)
class ChoiceEncoder:
    """int64, the choices themselves: () for Discrete, (D,) for MultiDiscrete."""

    space: spaces.Discrete[Any] | spaces.MultiDiscrete[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """() or (D,)"""
        return self.space.shape or ()

    @property
    def dtype(self) -> DTypeLike:
        """int64"""
        return np.int64

    def __call__(self, values: Any) -> NDArray[np.int64]:
        """See `Encoder`; (n,) or (n, D)."""
        return counted(self.space, values).reshape(-1, *self.shape)


def _check_vector(space: Space, where: str) -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in parts:
            _check_vector(part, f"{where}[{key!r}]")
    elif is_minari_image(space):
        raise TypeError(f"{where} {space} is an image beside other parts; keep one of them with a wrapper")
    elif not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        raise TypeError(
            f"{where} {space} is a {type(space).__name__}; allowed are Box, Discrete, MultiDiscrete, "
            f"MultiBinary, and Dict and Tuple of these; leave it out with a wrapper"
        )
