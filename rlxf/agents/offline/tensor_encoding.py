"""Encodings of the dataset as functions of tensors, equal to those of `rlxf.data.encoders`, for export."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space_channels_first
from torch import Tensor
from torch.nn import functional as F

from rlxf.data.encoders import ImageEncoder, observation_encoder
from rlxf.data.spaces import discrete_sizes, discrete_start, encoded_parts, is_image

Space = spaces.Space[Any]


def encode_observations(space: Space, values: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Encode observations (E, ...) of a space: (E, D) float32, or (E, C, H, W) uint8 for an image.

    Args:
        space: observation space: not nested, or a Dict of spaces that are not nested.
        values: the observations; by key for a Dict.
    """
    if isinstance(space, spaces.Dict):
        assert isinstance(values, Mapping)
        parts = encoded_parts(space).items()
        return torch.cat([_encode_features(part, values[key]) for key, part in parts], dim=1)
    assert isinstance(values, Tensor)
    if isinstance(observation_encoder(space), ImageEncoder):
        return _channels_first(space, values)
    return _encode_features(space, values)


def encode_actions(space: Space, actions: Tensor) -> Tensor:
    """Encode actions (E, ...): Box flattened to float32 (E, A), discrete ones counted from 0, int64."""
    if isinstance(space, spaces.Box):
        return _rows(actions).float()
    return (actions.long() - _start(space)).long()


def _encode_features(space: Space, values: Tensor) -> Tensor:
    """Encode values (E, ...) of a space that is not nested as features (E, D)."""
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        features = _rows(values).float()
        return features / 255 if is_image(space) else features
    choices = _rows(values.long() - _start(space)).unbind(1)
    one_hot = (F.one_hot(each, int(n)) for each, n in zip(choices, discrete_sizes(space), strict=True))  # type: ignore[arg-type]
    return torch.cat(list(one_hot), dim=1).float()


def _rows(values: Tensor) -> Tensor:
    """Flatten values (E, ...) to rows (E, D); values (E,) have D = 1."""
    return values.reshape(len(values), -1)


def _start(space: Space) -> Tensor:
    return torch.as_tensor(np.asarray(discrete_start(space), np.int64))


def _channels_first(space: Space, images: Tensor) -> Tensor:
    if images.dim() == 3:
        return images[:, None]
    return images if is_image_space_channels_first(space) else images.movedim(-1, 1)  # type: ignore[arg-type]
