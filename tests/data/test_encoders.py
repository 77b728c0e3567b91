"""Tests of the encoders of observations and actions."""

import numpy as np
import pytest
from gymnasium import spaces

from rlxf.data import action_encoder, observation_encoder
from rlxf.data.encoders import ImageEncoder
from rlxf.utils.errors import RowError

RNG = np.random.default_rng(0)
VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float64)
LAST = spaces.Box(0, 255, (36, 40, 3), np.uint8)
FIRST = spaces.Box(0, 255, (3, 36, 40), np.uint8)
GRAPH = spaces.Graph(VECTOR, None)
GRAY = spaces.Box(0, 255, (36, 40), np.uint8)


def pixels(space):
    return RNG.integers(256, size=(5, *space.shape), dtype=np.uint8)


def test_images_become_channels_first_and_stay_uint8():
    images = pixels(LAST)
    encode = observation_encoder(LAST)
    assert (encode.shape, encode.dtype) == ((3, 36, 40), np.uint8)
    rows = encode(images)
    assert rows.dtype == np.uint8
    for i, y, x, c in [(0, 0, 0, 0), (4, 35, 39, 2), (2, 7, 30, 1)]:
        assert rows[i, c, y, x] == images[i, y, x, c]


def test_channels_first_images_are_unchanged():
    images = pixels(FIRST)
    np.testing.assert_array_equal(observation_encoder(FIRST)(images), images)
    assert observation_encoder(FIRST).shape == FIRST.shape


def test_images_without_channels_get_a_channel_axis():
    images = pixels(GRAY)
    assert observation_encoder(GRAY).shape == (1, 36, 40)
    np.testing.assert_array_equal(observation_encoder(GRAY)(images)[:, 0], images)


@pytest.mark.parametrize("space", [LAST, FIRST, GRAY], ids=["last", "first", "gray"])
def test_image_encoding_round_trip(space):
    images = pixels(space)
    encode = observation_encoder(space)
    np.testing.assert_array_equal(encode.decode(encode(images)), images)


def test_float64_becomes_float32():
    values = RNG.normal(size=(4, 3))
    rows = observation_encoder(VECTOR)(values)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, values.astype(np.float32))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e300])
def test_values_not_finite_in_float32_are_reported(wrong):
    values = np.zeros((4, 3))
    values[2, 1] = wrong
    with pytest.raises(RowError, match=r"row 2: it is -?(nan|inf) at index 1"):
        observation_encoder(VECTOR)(values)


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (spaces.Box(-1, 1, (2, 3), np.float64), (6,), np.float32),
        (spaces.Discrete(4), (), np.int64),
        (spaces.MultiDiscrete([2, 3]), (2,), np.int64),
        (spaces.MultiBinary(3), (3,), np.int64),
    ],
    ids=["box", "discrete", "multidiscrete", "multibinary"],
)
def test_actions_are_encoded_without_loss(space, shape, dtype):
    space.seed(0)
    values = np.stack([space.sample() for _ in range(6)])
    encode = action_encoder(space)
    rows = encode(values)
    assert (encode.shape, encode.dtype) == (shape, dtype)
    assert (rows.shape, rows.dtype) == ((6, *shape), dtype)
    np.testing.assert_array_equal(rows.ravel(), values.astype(dtype).ravel())


def test_discrete_actions_of_shape_n_1_are_accepted():
    np.testing.assert_array_equal(action_encoder(spaces.Discrete(4))(np.array([[1], [3]])), [1, 3])


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Dict({"a": spaces.Discrete(2)}), "allowed are Box, Discrete, MultiDiscrete and MultiBinary"),
        (spaces.MultiDiscrete([[2, 2], [2, 2]]), "at most one axis"),
        (spaces.MultiBinary([2, 2]), "at most one axis"),
    ],
    ids=["dict", "grid", "grid of bits"],
)
def test_unsupported_actions_are_refused(space, message):
    with pytest.raises(TypeError, match=f"(?s)action space.*{message}"):
        action_encoder(space)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Text(5), "contains only text"),
        (spaces.Dict(), "is empty; use a space with at least one part"),
        (spaces.Dict({"a": spaces.Tuple([])}), "is empty; use a space with at least one part"),
        (spaces.Dict({"a": spaces.Tuple([spaces.Text(3)])}), "contains only text"),
        (
            spaces.Dict({"a": VECTOR, "b": spaces.Tuple([GRAPH])}),
            r"\['b'\]\[0\].*is a Graph; supported are Box",
        ),
        (spaces.Dict({"a": VECTOR, "view": LAST}), r"\['view'\].*an image of 4320 values .* at most 4096"),
    ],
    ids=["text", "empty", "nested empty", "nested text", "graph", "large image in a dict"],
)
def test_unsupported_observations_are_refused(space, message):
    with pytest.raises(TypeError, match=f"(?s)observation space.*{message}"):
        observation_encoder(space)


@pytest.mark.parametrize(
    ("space", "values"),
    [
        (spaces.Discrete(3, start=-1), [-1, 1, 0]),
        (spaces.MultiDiscrete([3, 2], start=[5, 0]), [[5, 1], [7, 0]]),
    ],
    ids=["discrete", "multidiscrete"],
)
def test_discrete_values_with_a_start_are_counted_from_0(space, values):
    np.testing.assert_array_equal(action_encoder(space)(np.array(values)), np.array(values) - space.start)


def test_a_discrete_action_outside_of_the_space_is_reported():
    with pytest.raises(RowError, match=r"row 1: it is \[0\], outside of Discrete\(3, start=1\)"):
        action_encoder(spaces.Discrete(3, start=1))(np.array([3, 0]))
    with pytest.raises(RowError, match=r"row 0: it is \[0, 2\], outside of MultiBinary"):
        action_encoder(spaces.MultiBinary(2))(np.array([[0, 2]]))


def test_the_largest_allowed_image_in_a_dict():
    largest = spaces.Box(0, 255, (64, 64, 1), np.uint8)
    assert observation_encoder(spaces.Dict({"a": VECTOR, "view": largest})).shape == (3 + 4096,)


@pytest.mark.parametrize("value", [300.0, -1.0, 0.5, np.nan])
def test_images_of_other_dtypes_are_not_wrapped(value):
    encoder = ImageEncoder(spaces.Box(0, 255, (3, 36, 36), np.uint8))
    images = np.full((2, 3, 36, 36), 7.0)
    assert (encoder(images) == 7).all()
    images[1, 0, 0, 0] = value
    with pytest.raises(RowError, match=rf"row 1: it has the value {value}, which is not a whole number"):
        encoder(images)
