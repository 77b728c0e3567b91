"""Tests of the JSON serialization of spaces and of descriptions of their differences."""

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlxf.training import describe_difference, memory_budget, space_from_json, space_to_json
from rlxf.training.strict_json import dump_json, load_json
from tests.spaces import discrete

INTEGERS = st.sampled_from(["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
SIZES = st.lists(st.integers(0, 3), max_size=3)


def numbers_of(dtype: np.dtype) -> st.SearchStrategy:
    if dtype.kind == "b":
        return st.booleans()
    if dtype.kind == "f":
        return st.floats(width=8 * dtype.itemsize, allow_nan=False)
    return st.integers(np.iinfo(dtype).min, np.iinfo(dtype).max)


@st.composite
def boxes(draw) -> Box:
    dtype = np.dtype(draw(st.sampled_from(["bool", "float16", "float32", "float64"]) | INTEGERS))
    shape = tuple(draw(SIZES))
    numbers, count = numbers_of(dtype), 2 * int(np.prod(shape))
    drawn = draw(st.lists(numbers, min_size=count, max_size=count) | numbers.map(lambda n: [n] * count))
    ordered = np.sort(np.array(drawn, dtype).reshape(2, *shape), axis=0)
    return Box(ordered[0, ...], ordered[1, ...], dtype=dtype.type)


LEAVES = (
    boxes()
    | st.builds(discrete, st.integers(1, 99), st.integers(0, 9), INTEGERS)
    | st.builds(
        lambda n, dtype: MultiDiscrete(n, dtype=dtype), st.lists(st.integers(1, 99), min_size=1), INTEGERS
    )
    | st.builds(
        lambda least, more, chars: Text(least + more, min_length=least, charset=chars),
        st.integers(1, 5),
        st.integers(0, 5),
        st.sets(st.characters(codec="utf-8"), min_size=1),
    )
    | st.builds(MultiBinary, st.integers(1, 9) | st.lists(st.integers(1, 4), min_size=1, max_size=3))
)
SPACES = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(st.text(), inner, max_size=3).map(Dict) | st.lists(inner, max_size=3).map(Tuple)
    ),
    max_leaves=5,
)


def through_json(space):
    return space_from_json(load_json(dump_json(space_to_json(space))))


@settings(deadline=None)
@given(SPACES)
def test_round_trip_of_any_space(space):
    back = through_json(space)
    assert type(back) is type(space)
    assert back == space
    assert space_to_json(back) == space_to_json(space)


@settings(deadline=None)
@given(boxes())
@example(Box(np.array([0.0, -0.0]), np.array([-0.0, 0.0])))
def test_round_trip_of_box_bounds_is_bit_exact(box):
    back = through_json(box)
    for name in ("low", "high", "bounded_below", "bounded_above"):
        ours, theirs = np.asarray(getattr(back, name)), np.asarray(getattr(box, name))
        assert ours.dtype == theirs.dtype
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(
    "box",
    [
        Box(-np.inf, np.inf, (3,), np.float64),
        Box(np.array([0, -np.inf], np.float32), np.array([np.inf, 1], np.float32)),
        Box(-np.inf, np.inf, (2,), np.int64),
        Box(0, 2**64 - 1, (2,), np.uint64),
        Box(-(2**63), 2**63 - 1, (), np.int64),
        Box(0.1, 0.3, (2,), np.float32),
        Box(0, 1, (0, 3)),
    ],
    ids=str,
)
def test_round_trip_of_extreme_bounds(box):
    back = through_json(box)
    assert back.shape == box.shape
    for name in ("low", "high", "bounded_below", "bounded_above"):
        assert np.array_equal(getattr(back, name), getattr(box, name))
    back.seed(3)
    box.seed(3)
    assert np.array_equal(back.sample(), box.sample())


def test_json_of_an_image_space_is_small():
    assert len(json.dumps(space_to_json(Box(0, 255, (84, 84, 4), np.uint8)))) < 100


def test_order_of_a_dict_is_preserved():
    space = Dict([("z", Discrete(2)), ("a", Discrete(3))])
    assert list(through_json(space)) == list(space) == ["z", "a"]


@pytest.mark.parametrize(
    ("space", "name"),
    [
        (spaces.Graph(Discrete(2), None), "Graph"),
        (Tuple([Discrete(2), spaces.Sequence(Discrete(2))]), "Sequence"),
        (type("Special", (Discrete,), {})(3), "Special"),
        (type("Discrete", (Discrete,), {})(3), "Discrete"),  # a subclass with the same name
        (Box(0, 1, (1,), np.longdouble), str(np.dtype(np.longdouble))),
    ],
)
def test_unsupported_space_is_rejected(space, name):
    with pytest.raises(TypeError, match=name):
        space_to_json(space)


def test_dict_with_non_string_key_is_rejected():
    with pytest.raises(TypeError, match="keys must be strings, got 3"):
        dump_json(space_to_json(Dict([(3, Discrete(2))])))


BOX = {"type": "Box", "shape": [2], "dtype": "float32", "low": 0.0, "high": 1.0}


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        None,
        "Box",
        {"type": "Text"},
        {"type": ["Box"]},
        {"type": "Discrete"},
        {"type": "Discrete", "n": 2, "start": 0, "dtype": "int64", "more": 1},
        {"type": "Discrete", "n": 0, "start": 0, "dtype": "int64"},
        {"type": "Discrete", "n": "2", "start": 0, "dtype": "int64"},
        {"type": "Discrete", "n": 2, "start": 0, "dtype": "object"},
        {"type": "Discrete", "n": 1000, "start": 0, "dtype": "int8"},
        {"type": "MultiDiscrete", "nvec": [0], "start": [0], "dtype": "int64"},
        {"type": "MultiDiscrete", "nvec": [[1], 2], "start": [0], "dtype": "int64"},
        {"type": "MultiBinary", "n": -1},
        {"type": "MultiBinary", "n": {"a": 1}},
        {"type": "Dict", "spaces": [1]},
        {"type": "Dict", "spaces": 1},
        {"type": "Tuple", "spaces": [{"type": "Box"}]},
        BOX | {"shape": [-1]},
        BOX | {"shape": ["x", 10**10]},
        BOX | {"shape": 3},
        BOX | {"dtype": "U9"},
        BOX | {"dtype": "uint8", "high": 256},
        BOX | {"low": "nan"},
        BOX | {"low": 2.0},
        BOX | {"low": None},
        BOX | {"low": [0.0, 0.0, 0.0]},
    ],
    ids=str,
)
def test_invalid_description_is_rejected(data):
    with pytest.raises(ValueError, match="does not describe a space"):
        space_from_json(data)


@pytest.mark.parametrize(
    "data",
    [
        BOX | {"shape": [10**6, 10**6]},
        {"type": "Tuple", "spaces": [BOX | {"shape": [2**21]}] * 3},
        {"type": "Dict", "spaces": {str(i): BOX for i in range(10**4)}},
        {"type": "Discrete", "n": 5 * 10**8, "start": 0, "dtype": "int64"},
        {"type": "MultiDiscrete", "nvec": [10**9, 2], "start": [0, 0], "dtype": "int64"},
        {"type": "MultiBinary", "n": [10**5, 10**5]},
        {"type": "Text", "min_length": 1, "max_length": 2, "characters": "".join(map(chr, range(32, 50000)))},
    ],
    ids=lambda data: data["type"],
)
def test_space_larger_than_the_budget_is_rejected_before_construction(data, monkeypatch):
    monkeypatch.setenv("RLXF_MEMORY_BUDGET", str(20 * 2**20))
    with pytest.raises(ValueError, match=r"requires .*[MG]B of memory .*the budget is 21.0 MB"):
        space_from_json(data)


def test_large_space_is_accepted_with_larger_budget_or_file():
    data = {"type": "Discrete", "n": 3 * 10**6, "start": 0, "dtype": "int64"}
    with pytest.raises(ValueError, match="raise the budget with RLXF_MEMORY_BUDGET=2016"):
        space_from_json(data)
    with memory_budget(2 * 10**8):
        assert space_from_json(data).n == 3 * 10**6
    assert space_from_json(data, file_bytes=10**8).n == 3 * 10**6


@settings(deadline=None)
@given(SPACES, SPACES)
def test_difference_is_empty_only_for_equal_spaces(first, second):
    assert describe_difference(first, first) == ""
    assert (describe_difference(first, second) == "") == (first == second)


@pytest.mark.parametrize(
    ("expected", "given", "sentence"),
    [
        (
            Box(-1, 1, (4,)),
            Box(-1, 1, (8,)),
            "expected Box of shape (4,) and dtype float32, got Box of shape (8,) and dtype float32",
        ),
        (
            Box(0, 1, (4,)),
            Box(0, 1, (4,), np.float64),
            "expected Box of shape (4,) and dtype float32, got Box of shape (4,) and dtype float64",
        ),
        (Discrete(3), Box(0, 1, (4,)), "expected Discrete(3), got Box of shape (4,) and dtype float32"),
        (Discrete(3), Discrete(4), "expected Discrete(3), got Discrete(4)"),
        (
            Box(np.array([[0.0, 0.0]]), np.array([[1.0, 1.0]]), dtype=np.float64),
            Box(np.array([[0.0, -1.0]]), np.array([[1.0, 1.0]]), dtype=np.float64),
            "expected the bounds [0.0, 1.0] at index (0, 1), got [-1.0, 1.0]",
        ),
        (
            Box(0.0, 1.0, (), np.float64),
            Box(0.0, 2.0, (), np.float64),
            "expected the bounds [0.0, 1.0] at index (), got [0.0, 2.0]",
        ),
        (Dict(a=Discrete(2)), Dict(b=Discrete(2)), "expected the subspaces ['a'], got ['b']"),
        (
            Dict(a=Discrete(2), b=Tuple([Discrete(5)])),
            Dict(a=Discrete(3), b=Tuple([Discrete(6)])),
            "in 'a': expected Discrete(2), got Discrete(3);"
            " in 'b': in 0: expected Discrete(5), got Discrete(6)",
        ),
    ],
)
def test_description_of_differences(expected, given, sentence):
    assert describe_difference(expected, given) == sentence


def test_round_trip_of_environment_spaces():
    env = gymnasium.make("CartPole-v1")
    for space in (env.observation_space, env.action_space):
        assert describe_difference(space, through_json(space)) == ""
