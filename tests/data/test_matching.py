""""""

from dataclasses import replace

import numpy as np
import pytest
from gymnasium import spaces

from rlxf.data import DatasetError, check_spaces_match, load_trajectories
from tests.datasets import CHOICE, ID, VECTOR, record_random

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
        spaces.Dict({"a": spaces.Discrete(3, dtype=np.int32)}),
        spaces.Discrete(2, dtype=np.int32),
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
