"""Tests of the checks of spaces, and of batches of observations and infos."""

import numpy as np
import pytest
from gymnasium import spaces

from rlxf.envs import check_spaces
from rlxf.envs.infos import info_of
from rlxf.envs.spaces import (
    check_playable,
    nested_parts,
    numbers_in_space,
    observation_from_nested_parts,
    row_of,
    rows_of,
)
from rlxf.utils.errors import FaultyEnvironmentError

VECTOR, ACT = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)
IMAGE = spaces.Box(0, 255, (8, 8, 3), np.uint8)
ACTIONS = [
    ACT,
    VECTOR,
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(4),
    spaces.Discrete(2, start=-1),
    spaces.MultiDiscrete([2, 3], start=[1, 0]),
]
GRID = spaces.MultiDiscrete([[2, 2], [2, 2]])


@pytest.mark.parametrize(
    "observation",
    [
        VECTOR,
        IMAGE,
        spaces.Box(-np.inf, np.inf, (3,)),
        spaces.Discrete(3),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(4),
        spaces.Dict({"a": VECTOR, "b": IMAGE, "c": spaces.Discrete(3)}),
    ],
)
def test_supported_observation_spaces_pass(observation):
    check_spaces(observation, ACT)


@pytest.mark.parametrize("action", ACTIONS)
def test_supported_action_spaces_pass(action):
    check_spaces(VECTOR, action)


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        (spaces.Text(5), "Text"),
        (spaces.Tuple([VECTOR, VECTOR]), "Tuple"),
        (spaces.Sequence(VECTOR), "Sequence"),
        (spaces.Dict({"a": VECTOR, "inner": spaces.Dict({"b": VECTOR})}), "'inner'.*Dict"),
        (spaces.Dict({"a": VECTOR, "mission": spaces.Text(5)}), "'mission'.*Text"),
        (spaces.Discrete(3, start=1), "starts at 1"),
        (spaces.MultiDiscrete([3, 3], start=[0, 1]), r"starts at \[0 1\]"),
        (GRID, "2 axes"),
        (spaces.MultiBinary([2, 2]), "2 axes"),
        (spaces.Box(0, 1, ()), "no axis"),
        (spaces.Box(0, 1, (2, 0)), "is empty"),
        (spaces.Dict({}), "is empty"),
        (spaces.Dict({"a": VECTOR, "none": spaces.Box(0, 1, (0,))}), "'none'.*is empty"),
    ],
)
def test_unsupported_observation_space_raises_with_the_allowed_ones(observation, expected):
    with pytest.raises(TypeError, match=f"(?s)observation space.*{expected}.*Allowed are.*MultiBinary"):
        check_spaces(observation, ACT)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (spaces.Dict({"a": ACT}), "Dict"),
        (spaces.Tuple([ACT]), "Tuple"),
        (spaces.Box(-np.inf, 1, (2,)), "finite bounds"),
        (spaces.Box(0, 9, (2,), np.int64), "holds int64, not real numbers: use MultiDiscrete"),
        (spaces.Box(0, 1, (0,)), "is empty"),
        (GRID, "2 axes"),
    ],
)
def test_unsupported_action_space_raises_with_the_allowed_ones(action, expected):
    with pytest.raises(TypeError, match=f"(?s)action space.*{expected}.*Allowed are"):
        check_spaces(VECTOR, action)


NESTED = spaces.Dict({"pair": spaces.Tuple([VECTOR, spaces.Dict({"a": IMAGE})]), "mission": spaces.Text(5)})


@pytest.mark.parametrize("observation", [VECTOR, spaces.Discrete(3, start=1), spaces.Tuple([GRID]), NESTED])
@pytest.mark.parametrize("action", [*ACTIONS, spaces.Box(0, 9, (2,), np.int64)])
def test_playable_spaces_pass(observation, action):
    check_playable(observation, action)


@pytest.mark.parametrize(
    ("observation", "action", "expected"),
    [
        (spaces.Text(5), ACT, "has only text parts"),
        (
            spaces.Dict({"in": spaces.Tuple([spaces.Graph(VECTOR, None)])}),
            ACT,
            r"\['in'\]\[0\].*Graph.*Allowed",
        ),
        (VECTOR, spaces.Dict({"a": ACT}), "action space.*Dict.*Allowed are Box"),
    ],
)
def test_unplayable_space_raises(observation, action, expected):
    with pytest.raises(TypeError, match=f"(?s){expected}"):
        check_playable(observation, action)


def test_info_of_has_only_the_entries_of_one_environment():
    mask, other = np.array([True, False]), np.array([True, True])
    infos = {
        "both": np.array([3, 4]),
        "_both": other,
        "one": np.array(["x", None], dtype=object),
        "_one": mask,
        "inner": {"deep": np.array([0.5, 0.0]), "_deep": mask},
        "_inner": mask,
        "of_the_batch": "no mask",
    }
    assert info_of(infos, 0) == {"both": 3, "one": "x", "inner": {"deep": 0.5}}
    assert info_of(infos, 1) == {"both": 4}


def test_row_of_copies_from_arrays_dicts_of_arrays_and_arrays_of_dicts():
    batch = np.arange(6.0).reshape(2, 3)
    of_dicts = np.array([{"a": batch[0]}, {"a": batch[1]}], dtype=object)
    for row in (row_of(batch, 1), row_of({"a": batch}, 1)["a"], row_of(of_dicts, 1)["a"]):
        assert row.tolist() == [3, 4, 5]
        row += 1
    assert batch[1].tolist() == [3, 4, 5]


BATCH = {"pair": (np.arange(3), {"deep": np.arange(6).reshape(3, 2)}), "mission": ("left", "right", "stay")}


def test_row_of_nested_parts_and_text():
    row = row_of(BATCH, 1)
    assert (int(row["pair"][0]), row["pair"][1]["deep"].tolist(), row["mission"]) == (1, [2, 3], "right")
    last = np.array([None, row, None], dtype=object)  # Gymnasium's format of final observations
    copy = row_of(last, 1)
    copy["pair"][1]["deep"] += 1
    assert row["pair"][1]["deep"].tolist() == [2, 3]


def test_rows_of_nested_parts_and_text():
    rows = rows_of(BATCH, np.array([2, 0]))
    assert rows["pair"][0].tolist() == [2, 0]
    assert rows["pair"][1]["deep"].tolist() == [[4, 5], [0, 1]]
    assert rows["mission"] == ("stay", "left")


def test_nested_observations_are_restored_from_their_arrays_without_text():
    word = spaces.Text(5)
    inner = spaces.Dict({"b": VECTOR, "word": word})
    space = spaces.Dict({"a": IMAGE, "pair": spaces.Tuple([word, inner, spaces.Discrete(3)])})
    rng = np.random.default_rng(0)
    images, vectors, numbers = rng.integers(0, 255, (2, 8, 8, 3)), rng.normal(size=(2, 3)), np.array([2, 0])
    words = ("one", "two")
    batch = {"a": images, "pair": (words, {"b": vectors, "word": words}, numbers)}
    arrays = nested_parts(space, batch, "seen")
    assert set(arrays) == {"seen.a", "seen.pair.1.b", "seen.pair.2"}
    restored = observation_from_nested_parts(space, arrays, "seen")
    np.testing.assert_array_equal(restored["a"], images)
    missing, found, choice = restored["pair"]
    assert missing is None
    assert set(found) == {"b"}
    np.testing.assert_array_equal(found["b"], vectors)
    np.testing.assert_array_equal(choice, numbers)
    assert set(nested_parts(VECTOR, vectors, "seen")) == {"seen"}


def test_arrays_of_objects_become_numbers_of_their_space():
    space = spaces.Dict({"pair": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,), np.float32)])})
    found = numbers_in_space(space, {"pair": (2, np.array([0.5, 1], object)), "other": None})
    assert found["pair"][0] == 2
    assert found["pair"][1].dtype == np.float32
    assert found["pair"][1].tolist() == [0.5, 1]
    with pytest.raises(FaultyEnvironmentError, match=r"numbers of its space Discrete\(3\), got array"):
        numbers_in_space(spaces.Discrete(3), np.array(None))
