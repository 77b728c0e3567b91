import numpy as np
import pytest
from gymnasium import spaces

from rlxf.envs.trajectories import action_encoder, observation_encoder
from rlxf.envs.trajectories.errors import RowError

RNG = np.random.default_rng(0)
VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float64)
LAST = spaces.Box(0, 255, (36, 40, 3), np.uint8)
FIRST = spaces.Box(0, 255, (3, 36, 40), np.uint8)
GRAY = spaces.Box(0, 255, (36, 40), np.uint8)


def pixels(space):
    return RNG.integers(256, size=(5, *space.shape), dtype=np.uint8)


def test_images_come_channels_first_and_stay_bytes():
    images = pixels(LAST)
    encode = observation_encoder(LAST)
    assert (encode.shape, encode.dtype) == ((3, 36, 40), np.uint8)
    rows = encode(images)
    assert rows.dtype == np.uint8
    for i, y, x, c in [(0, 0, 0, 0), (4, 35, 39, 2), (2, 7, 30, 1)]:
        assert rows[i, c, y, x] == images[i, y, x, c]


def test_images_with_channels_first_stay_as_they_are():
    images = pixels(FIRST)
    np.testing.assert_array_equal(observation_encoder(FIRST)(images), images)
    assert observation_encoder(FIRST).shape == FIRST.shape


def test_images_without_channels_get_one():
    images = pixels(GRAY)
    assert observation_encoder(GRAY).shape == (1, 36, 40)
    np.testing.assert_array_equal(observation_encoder(GRAY)(images)[:, 0], images)


@pytest.mark.parametrize("space", [LAST, FIRST, GRAY], ids=["last", "first", "gray"])
def test_images_go_back(space):
    images = pixels(space)
    encode = observation_encoder(space)
    np.testing.assert_array_equal(encode.back(encode(images)), images)


def test_doubles_become_floats():
    values = RNG.normal(size=(4, 3))
    rows = observation_encoder(VECTOR)(values)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, values.astype(np.float32))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e300])
def test_a_number_that_is_not_finite_in_float32_is_named(wrong):
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
    ],
    ids=["box", "discrete", "multidiscrete"],
)
def test_actions_keep_their_meaning(space, shape, dtype):
    space.seed(0)
    values = np.stack([space.sample() for _ in range(6)])
    encode = action_encoder(space)
    rows = encode(values)
    assert (encode.shape, encode.dtype) == (shape, dtype)
    assert (rows.shape, rows.dtype) == ((6, *shape), dtype)
    np.testing.assert_array_equal(rows.ravel(), values.astype(dtype).ravel())


def test_discrete_actions_stored_as_a_column_are_read():
    np.testing.assert_array_equal(action_encoder(spaces.Discrete(4))(np.array([[1], [3]])), [1, 3])


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (spaces.MultiBinary(3), "allowed are Box, Discrete and MultiDiscrete"),
        (spaces.Dict({"a": spaces.Discrete(2)}), "allowed are"),
        (spaces.Discrete(3, start=1), "count from 0"),
        (spaces.MultiDiscrete([3, 3], start=[0, 1]), "count from 0"),
        (spaces.MultiDiscrete([[2, 2], [2, 2]]), "at most one axis"),
    ],
    ids=["multibinary", "dict", "start", "starts", "grid"],
)
def test_other_actions_are_refused(space, named):
    with pytest.raises(TypeError, match=f"(?s)action space.*{named}"):
        action_encoder(space)


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (spaces.Text(5), "is a Text; allowed are Box"),
        (spaces.Dict({"a": VECTOR, "b": spaces.Tuple([spaces.Text(3)])}), r"\['b'\]\[0\].*is a Text"),
        (spaces.Dict({"a": VECTOR, "view": LAST}), r"\['view'\].*an image beside other parts"),
    ],
    ids=["text", "nested text", "image in a dict"],
)
def test_other_observations_are_refused(space, named):
    with pytest.raises(TypeError, match=f"(?s)observation space.*{named}"):
        observation_encoder(space)
