"""Tests of nested spaces: flat vectors of their values, and differences between spaces."""

from dataclasses import replace

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector.utils import batch_space

from rlxf.data import DatasetError, check_spaces_match, load_trajectories
from rlxf.data.space_comparison import space_mismatches
from rlxf.data.spaces import count_values, flatten_rows, unflatten_rows
from rlxf.utils.errors import RowError
from tests.datasets import CHOICE, ID, VECTOR, record_random, stacked
from tests.spaces import discrete

UNIT_BOX = spaces.Box(-1, 1, (2, 3), np.float64)


VIEW = spaces.Box(0, 255, (7, 7, 3), np.uint8)


INNER = spaces.Dict({"z": spaces.Discrete(3, start=-1), "a": spaces.MultiDiscrete([2, 4], start=[1, 0])})


SPACES = {
    "vector": spaces.Box(-1, 1, (4,)),
    "matrix of doubles": UNIT_BOX,
    "bytes": spaces.Box(0, 9, (2, 2), np.uint8),
    "one choice": spaces.Discrete(5),
    "choice from minus 1": spaces.Discrete(3, start=-1),
    "choices": spaces.MultiDiscrete([2, 3, 4]),
    "grid of choices": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "bits": spaces.MultiBinary(4),
    "nested": spaces.Dict({"pair": spaces.Tuple([UNIT_BOX, INNER]), "bit": spaces.MultiBinary([2, 2])}),
}


TEXTS = spaces.Dict({"texts": spaces.Tuple([spaces.Text(9), UNIT_BOX]), "bit": spaces.MultiBinary(2)})


@pytest.mark.parametrize("space", [*SPACES.values(), TEXTS], ids=[*SPACES, "texts"])
@pytest.mark.parametrize("count", [1, 5])
def test_values_of_a_batch_are_counted(space, count):
    assert count_values(batch_space(space, count).sample()) == count


@pytest.mark.parametrize("name", SPACES)
def test_flatten_rows_equals_gymnasium(name):
    space = SPACES[name]
    space.seed(0)
    values = [space.sample() for _ in range(20)]
    slow = np.stack([spaces.flatten(space, value) for value in values]).astype(np.float32)
    rows = flatten_rows(space, stacked(space, values))
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, slow)


@pytest.mark.parametrize("name", SPACES)
def test_unflatten_rows_equals_gymnasium(name):
    space = SPACES[name]
    space.seed(0)
    rows = flatten_rows(space, stacked(space, [space.sample() for _ in range(20)]))
    slow = stacked(space, [spaces.unflatten(space, row) for row in rows])
    assert data_equivalence(unflatten_rows(space, rows), slow, exact=True)


@pytest.mark.parametrize("wrong", [-1, 3, 1.5])
def test_a_value_outside_of_discrete_is_reported_with_its_row(wrong):
    with pytest.raises(RowError, match=rf"row 2: it is \[{wrong}\], outside of Discrete\(3\)") as error:
        flatten_rows(spaces.Discrete(3), np.array([0, 2, wrong, 9]))
    assert error.value.row == 2


@pytest.mark.parametrize("space", [spaces.Text(4), spaces.Sequence(UNIT_BOX)])
def test_unsupported_spaces_are_refused(space):
    with pytest.raises(TypeError, match="cannot be flattened to a vector"):
        flatten_rows(space, ["word"])


def test_unsupported_spaces_have_no_values():
    with pytest.raises(TypeError, match="vectors cannot be converted back to values of"):
        unflatten_rows(spaces.Sequence(UNIT_BOX), np.zeros((1, 4), np.float32))


MISSION = spaces.Dict(
    {"view": VIEW, "mission": spaces.Text(9), "inner": spaces.Dict({"note": spaces.Text(3)})}
)


def test_text_is_left_out_and_images_are_scaled():
    rng = np.random.default_rng(0)
    pixels = rng.integers(256, size=(5, *VIEW.shape), dtype=np.uint8)
    words = ("go",) * 5
    rows = flatten_rows(MISSION, {"view": pixels, "mission": words, "inner": {"note": words}})
    np.testing.assert_array_equal(
        rows, [[np.float32(x) / np.float32(255) for x in p.ravel()] for p in pixels]
    )
    values = unflatten_rows(MISSION, rows)
    np.testing.assert_array_equal(values["view"], pixels)
    assert (values["mission"], values["inner"]) == (("",) * 5, {"note": ("",) * 5})


def test_image_round_trip_is_exact_for_all_pixel_values():
    space = spaces.Box(0, 255, (16, 16, 1), np.uint8)
    pixels = np.arange(256, dtype=np.uint8).reshape(1, *space.shape)
    np.testing.assert_array_equal(unflatten_rows(space, flatten_rows(space, pixels)), pixels)


def test_rows_do_not_depend_on_the_order_of_dict_keys():
    parts = {"z": spaces.Box(-1, 1, (2,), np.float32), "a": spaces.Discrete(3), "m": spaces.MultiBinary(2)}
    values = {"z": np.array([[0.1, 0.2]], np.float32), "a": np.array([2]), "m": np.array([[1, 0]])}
    sorted_, as_given = spaces.Dict(parts), spaces.Dict(**parts)
    assert list(as_given.spaces) != list(sorted_.spaces)
    rows = flatten_rows(sorted_, values)
    np.testing.assert_array_equal(flatten_rows(as_given, values), rows)
    restored = unflatten_rows(as_given, rows)
    assert all(np.array_equal(restored[key], values[key]) for key in parts)


BOX = spaces.Box(-1, 1, (2,), np.float32)


LAST, FIRST = spaces.Box(0, 255, (36, 40, 3), np.uint8), spaces.Box(0, 255, (3, 36, 40), np.uint8)


@pytest.fixture
def trajectories(minari_root):
    record_random()
    return load_trajectories(ID)


COMPATIBLE = {
    "the same": (VECTOR, CHOICE, VECTOR, CHOICE),
    "doubles": (VECTOR, CHOICE, spaces.Box(-np.inf, np.inf, (3,), np.float64), CHOICE),
    "other bounds": (VECTOR, CHOICE, spaces.Box(-5, 5, (3,)), CHOICE),
    "channels first": (LAST, CHOICE, FIRST, CHOICE),
    "nested": (
        spaces.Dict({"a": VECTOR, "b": CHOICE}),
        BOX,
        spaces.Dict({"b": CHOICE, "a": spaces.Box(-9, 9, (3,), np.float64)}),
        spaces.Box(-1, 1, (2,), np.float64),
    ),
    "other words": (
        spaces.Dict({"a": VECTOR, "mission": spaces.Text(5)}),
        CHOICE,
        spaces.Dict({"a": VECTOR, "mission": spaces.Text(99), "hint": spaces.Text(3)}),
        CHOICE,
    ),
    "other whole numbers": (
        spaces.Dict({"a": spaces.Discrete(3)}),
        CHOICE,
        spaces.Dict({"a": discrete(3, dtype="int32")}),
        discrete(2, dtype="int32"),
    ),
}


INCOMPATIBLE = {
    "shape": (VECTOR, CHOICE, spaces.Box(-1, 1, (4,)), CHOICE, "observation space: expected"),
    "turned": (spaces.Box(-1, 1, (2, 3)), CHOICE, spaces.Box(-1, 1, (3, 2)), CHOICE, "observation space"),
    "kind": (VECTOR, CHOICE, CHOICE, CHOICE, "observation space"),
    "image": (LAST, CHOICE, spaces.Box(0, 255, (36, 40, 3), np.float32), CHOICE, "observation space"),
    "choices": (VECTOR, CHOICE, VECTOR, spaces.Discrete(3), "action space: expected"),
    "bounds": (VECTOR, BOX, VECTOR, spaces.Box(-2, 2, (2,)), "action space"),
    "upper bounds": (VECTOR, BOX, VECTOR, spaces.Box(-1, 2, (2,)), "action space"),
    "keys": (spaces.Dict({"a": VECTOR}), CHOICE, spaces.Dict({"b": VECTOR}), CHOICE, r"the parts \['a'\]"),
    "turned image in a Dict": (
        spaces.Dict({"a": LAST}),
        CHOICE,
        spaces.Dict({"a": FIRST}),
        CHOICE,
        "in 'a': expected",
    ),
    "counts from": (VECTOR, CHOICE, VECTOR, spaces.Discrete(2, start=1), "action space: expected"),
    "bits": (VECTOR, spaces.MultiBinary(2), VECTOR, spaces.MultiBinary(3), "action space: expected"),
    "part": (
        spaces.Dict({"a": VECTOR}),
        CHOICE,
        spaces.Dict({"a": CHOICE}),
        CHOICE,
        "in 'a': expected",
    ),
}


@pytest.mark.parametrize("name", COMPATIBLE)
def test_environments_with_compatible_spaces_are_accepted(trajectories, name):
    observation, action, *env = COMPATIBLE[name]
    check_spaces_match(replace(trajectories, observation_space=observation, action_space=action), *env)


@pytest.mark.parametrize("name", INCOMPATIBLE)
def test_environments_with_incompatible_spaces_are_refused(trajectories, name):
    observation, action, env_observation, env_action, message = INCOMPATIBLE[name]
    data = replace(trajectories, observation_space=observation, action_space=action)
    with pytest.raises(DatasetError, match=f"does not fit dataset {ID}: .*{message}"):
        check_spaces_match(data, env_observation, env_action)


def test_dtypes_of_choices_are_no_difference():
    """Minari does not save them."""
    for kind, numbers in ((discrete, 3), (spaces.MultiDiscrete, [3, 2])):
        ours, theirs = kind(numbers, dtype="int64"), kind(numbers, dtype="int32")
        assert not list(space_mismatches((ours, ours), (theirs, theirs)))
    assert list(space_mismatches((ours, ours), (ours, spaces.MultiDiscrete([3, 2], start=[0, 1]))))
