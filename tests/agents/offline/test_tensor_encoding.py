"""Encodings of tensors equal those of the datasets."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlxf.agents.offline.tensor_encoding import encode_actions, encode_observations
from rlxf.data import action_encoder, observation_encoder
from tests.agents.decision_transformer.worlds import ACTIONS
from tests.datasets import stacked

IMAGES = {
    "image, channels last": spaces.Box(0, 255, (36, 40, 3), np.uint8),
    "image, channels first": spaces.Box(0, 255, (3, 40, 36), np.uint8),
    "image without channels": spaces.Box(0, 255, (40, 36), np.uint8),
}
PARTS = {
    "vector": spaces.Box(-1.0, 1.0, (2, 3), np.float64),
    "choice": spaces.Discrete(4, start=-2),
    "choices": spaces.MultiDiscrete([2, 3], start=[1, -1]),
    "bits": spaces.MultiBinary(3),
    "small image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
}
PARTS["number"] = NUMBER = spaces.Box(-1.0, 1.0, (), np.float32)
OBSERVATIONS = IMAGES | PARTS | {"Dict": spaces.Dict(PARTS)}


def tensors(values):
    if isinstance(values, dict):
        return {key: torch.as_tensor(value) for key, value in values.items()}
    return torch.as_tensor(values)


def samples(space):
    space.seed(0)
    return stacked(space, [space.sample() for _ in range(5)])


@pytest.mark.parametrize("space", OBSERVATIONS.values(), ids=OBSERVATIONS)
def test_observations_are_encoded_as_in_datasets(space):
    values = samples(space)
    expected = observation_encoder(space)(values)
    encoded = encode_observations(space, tensors(values)).numpy()
    assert encoded.dtype == expected.dtype
    np.testing.assert_array_equal(encoded, expected)


@pytest.mark.parametrize("space", [*ACTIONS.values(), NUMBER], ids=[*ACTIONS, "number"])
def test_actions_are_encoded_as_in_datasets(space):
    values = samples(space)
    expected = action_encoder(space)(values)
    encoded = encode_actions(space, torch.as_tensor(values)).numpy()
    assert encoded.dtype == expected.dtype
    np.testing.assert_array_equal(encoded, expected)
