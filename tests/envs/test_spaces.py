import numpy as np
import pytest
from gymnasium import spaces

from rlxf.envs import check_spaces
from rlxf.envs.spaces import check_playable

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
