"""Encoders of observations and actions as rows of arrays, for datasets and while acting."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.preprocessing import is_image_space_channels_first

from rlxf.data.spaces import (
    FLAT,
    DiscreteSpace,
    channels_first,
    discrete_indices,
    encoded_width,
    flatten_rows,
    image_shape,
    is_image,
    is_text,
    is_text_only,
    leaves,
    unflatten_rows,
)
from rlxf.utils.errors import RowError

Space = spaces.Space[Any]
LARGEST_IMAGE = 4096
"""Largest number of values in an image that is part of a vector observation; each becomes a float32."""
MIN_IMAGE_SIZE = 36
"""Smallest height and width, in pixels, of an image for SB3's ``NatureCNN``."""


def observation_encoder(space: Space) -> "VectorEncoder | ImageEncoder":
    """Return the encoder of an observation space.

    - **Image**: `ImageEncoder`, for a uint8 Box from 0 to 255 with three axes, or with two axes of at least
      32. Channels may be first or last; as in Stable-Baselines3, the smallest axis is the channel axis.
    - **Everything else**: `VectorEncoder`. In a Dict or a Tuple, images of at most `LARGEST_IMAGE` values
      are features, and text is left out.

    Raises:
        TypeError: if a part is not a Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple, or is a larger
            image, or if the space is empty or contains only text.
    """
    if is_image(space):
        assert isinstance(space, spaces.Box)
        return ImageEncoder(space)
    if not any(True for _ in leaves(space)):
        raise TypeError(f"observation space {space} is empty; use a space with at least one part")
    if is_text_only(space):
        raise TypeError(f"observation space {space} contains only text, which is not supported")
    _check_vector(space)
    return VectorEncoder(space)


def has_image_extractor(shape: tuple[int, ...]) -> bool:
    """Return whether encoded observations of this shape are images that pass through ``NatureCNN``.

    Smaller images are standardized and flattened, as vectors.
    """
    return len(shape) == 3 and min(shape[1:]) >= MIN_IMAGE_SIZE


def action_encoder(space: Space) -> "VectorEncoder | DiscreteEncoder":
    """Return the encoder of an action space: `VectorEncoder` for Box, `DiscreteEncoder` for discrete spaces.

    Raises:
        TypeError: if the space is not a Box, Discrete, MultiDiscrete or MultiBinary, or is discrete with more
            than one axis.
    """
    if isinstance(space, spaces.Box):
        return VectorEncoder(space)
    if not isinstance(space, DiscreteSpace):
        raise TypeError(f"action space {space}: allowed are Box, Discrete, MultiDiscrete and MultiBinary")
    if len(space.shape or ()) > 1:
        raise TypeError(f"action space {space}: a discrete space must have at most one axis")
    return DiscreteEncoder(space)


@dataclass(frozen=True)
class VectorEncoder:
    """Encoder as float32 (D,): values flattened by Gymnasium's rule, see `flatten_rows`.

    Numbers stay unchanged, and Discrete becomes one-hot. The parts of Dict and Tuple are concatenated; their
    images are scaled to [0, 1], and their text is left out.
    """

    space: Space
    dtype: ClassVar = np.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """(D,)"""
        return (encoded_width(self.space),)

    def __call__(self, values: Any) -> NDArray[np.float32]:
        """Encode n values of the space, stacked along the first axis of each array, as rows (n, D).

        Raises:
            RowError: if a value is NaN or infinite in float32, or outside of a discrete space.
        """
        rows = flatten_rows(self.space, values)
        finite = np.isfinite(rows)
        if not finite.all():
            row, column = (int(i) for i in np.argwhere(~finite)[0])
            raise RowError(row, f"is {rows[row, column]} at index {column}")
        return rows

    def match_axes(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values unchanged; see `ImageEncoder`."""
        return values

    def decode(self, rows: NDArray[np.float32]) -> Any:
        """Decode rows (n, D) to n values of the space, stacked along the first axis of each array."""
        return unflatten_rows(self.space, rows)


@dataclass(frozen=True)
class ImageEncoder:
    """Encoder of images as uint8 (C, H, W), channels first as in Stable-Baselines3.

    C is 1 for images without a channel axis.
    """

    space: spaces.Box
    dtype: ClassVar = np.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W)"""
        return image_shape(self.space)

    def __call__(self, values: Any) -> NDArray[np.uint8]:
        """Encode images (n, ...) as rows (n, C, H, W).

        Raises:
            RowError: if a value of another dtype than uint8 is not a whole number from 0 to 255.
        """
        images = np.asarray(values)
        if images.dtype != np.uint8:
            _check_bytes(images)
        return channels_first(self.space, images.astype(np.uint8, copy=False).reshape(-1, *self.space.shape))

    def match_axes(self, values: NDArray[Any]) -> NDArray[Any]:
        """Move the channel axis of images (n, ...), first or last, to its position in the space."""
        transposed = (np.moveaxis(values, 1, -1), np.moveaxis(values, -1, 1)) if values.ndim == 4 else ()
        return next((view for view in (values, *transposed) if view.shape[1:] == self.space.shape), values)

    def decode(self, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Decode rows (n, C, H, W) to images of the space, (n, ...)."""
        if len(self.space.shape) == 2:
            return rows[:, 0]
        return rows if is_image_space_channels_first(self.space) else np.moveaxis(rows, 1, -1)


@dataclass(frozen=True)
class DiscreteEncoder:
    """Encoder of discrete values as int64 counted from 0: () for Discrete, else (D,)."""

    space: DiscreteSpace
    dtype: ClassVar = np.int64

    @property
    def shape(self) -> tuple[int, ...]:
        """() or (D,)"""
        return self.space.shape or ()

    def __call__(self, values: Any) -> NDArray[np.int64]:
        """Encode n values as rows (n,) or (n, D).

        Raises:
            RowError: if a value is outside of the space.
        """
        return discrete_indices(self.space, values).reshape(-1, *self.shape)


Encoder = VectorEncoder | ImageEncoder | DiscreteEncoder
"""Encoder of observations or actions as rows of the encoder's ``shape`` and ``dtype``."""


def _check_bytes(images: NDArray[Any]) -> None:
    """Raise RowError unless all values of images are whole numbers from 0 to 255."""
    valid = (images >= 0) & (images <= 255) & (images == np.floor(images))
    if not valid.all():
        place = np.unravel_index(int(np.argmin(valid)), images.shape)
        raise RowError(
            int(place[0]), f"has the value {images[place]}, which is not a whole number in [0, 255]"
        )


def _check_vector(space: Space) -> None:
    for path, part in leaves(space, "observation space"):
        if is_image(part) and encoded_width(part) > LARGEST_IMAGE:
            raise TypeError(
                f"{path} {part} is an image of {encoded_width(part)} values among other parts, where at most "
                f"{LARGEST_IMAGE} are allowed; make it smaller with gymnasium.wrappers.TransformObservation, "
                f"or make it the whole observation, which is processed by a convolutional network"
            )
        if not is_text(part) and not isinstance(part, FLAT):
            raise TypeError(
                f"{path} {part} is a {type(part).__name__}; supported are Box, Discrete, MultiDiscrete, "
                f"MultiBinary, and Dict and Tuple of these; remove it with a wrapper"
            )
