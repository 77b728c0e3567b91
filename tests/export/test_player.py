"""The player refuses observations that the agent cannot receive, and needs no locale."""

import json
import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces

from rlxf.export.acting_step import number_range
from rlxf.export.onnx_player import Player, as_input
from tests.agents.decision_transformer.worlds import ACTIONS as OFFLINE_ACTIONS
from tests.agents.decision_transformer.worlds import small_agent as offline_agent
from tests.agents.decision_transformer.worlds import some_trajectories
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    SMALL_EXTRACTOR,
    VECTOR,
    recurrent_core,
    sampled,
    scripts,
    shifted,
    small_agent,
)

ENVS = 2
PARTS = spaces.Dict(
    {
        "number": spaces.Discrete(3),
        "choices": spaces.MultiDiscrete([2, 3]),
        "bits": spaces.MultiBinary(2),
        "vector": VECTOR,
        "image": spaces.Box(0, 255, (36, 36, 1), np.uint8),
    }
)
VALID = {
    "number": np.array([2, 0]),
    "choices": np.array([[1, 2], [0, 0]]),
    "bits": np.array([[0, 1], [1, 1]]),
    "vector": np.zeros((ENVS, 3)),
    "image": np.full((ENVS, 36, 36, 1), 255),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return the folder of an exported agent whose observations have parts of all kinds."""
    folder, policy = tmp_path_factory.mktemp("export"), "MultiInputGTrXLPolicy"
    env = scripts(shifted(ENVS), PARTS, ACTIONS["Box"])
    agent = small_agent(env, policy, core=recurrent_core(layers=1), policy_kwargs=SMALL_EXTRACTOR[policy])
    agent.export(folder / "policy.onnx", n_envs=ENVS)
    return folder


@pytest.fixture(scope="module")
def player(exported):
    return Player(exported / "policy.onnx")


def test_description_has_the_ranges_of_the_parts(player):
    largest = float(np.finfo(np.float32).max)
    parts = player.description["observations"].items()
    assert {name: (part["low"], part["high"]) for name, part in parts} == {
        "observation.bits": (0, 1),
        "observation.choices": ([0, 0], [1, 2]),
        "observation.image": (0, 255),
        "observation.number": (0, 2),
        "observation.vector": (-largest, largest),
    }


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=2),
        spaces.Discrete(2, start=-5),
        spaces.MultiDiscrete([2, 3], start=[-1, 4]),
        spaces.MultiDiscrete([[2, 3], [4, 1]]),
        spaces.MultiBinary((2, 2)),
    ],
)
def test_the_range_is_that_of_the_space(space):
    part = json.loads(json.dumps(number_range(space))) | {"dtype": "int64", "shape": [1, *space.shape]}
    for bound, step in (("low", -1), ("high", 1)):
        value = np.broadcast_to(part[bound], space.shape).astype(space.dtype)
        assert space.contains(value)
        assert (as_input("a", value, part)[0] == value).all()
        with pytest.raises(ValueError, match=r"a contains .* must be int64 from"):
            as_input("a", value + step, part)


def test_valid_observations_of_any_dtype_are_played(player):
    expected, _ = player.predict(VALID)
    for dtype in (np.float64, np.int64, np.uint8):
        action, _ = player.predict({key: value.astype(dtype) for key, value in VALID.items()})
        np.testing.assert_array_equal(action, expected)
    lists = {key: value.tolist() for key, value in VALID.items()}
    np.testing.assert_array_equal(player.predict(lists)[0], expected)
    player.predict(sampled(PARTS, ENVS))


INVALID = {
    "Discrete, too large": ("number", 7, "number contains 7, must be int64 from 0 to 2"),
    "Discrete, negative": ("number", -1, "number contains -1, must be int64 from 0 to 2"),
    "Discrete, NaN": ("number", np.nan, "number contains nan, must be int64 from 0 to 2"),
    "Discrete, infinite": ("number", np.inf, "number contains inf, must be int64 from 0 to 2"),
    "Discrete, fraction": ("number", 0.7, r"number contains 0\.7, must be int64 from 0 to 2"),
    "MultiDiscrete": ("choices", 2, "choices contains 2, must be int64 from 0 to 1"),
    "MultiBinary": ("bits", 9, "bits contains 9, must be int8 from 0 to 1"),
    "MultiBinary, fraction": ("bits", 0.7, r"bits contains 0\.7, must be int8 from 0 to 1"),
    "MultiBinary, overflow": ("bits", 256, "bits contains 256, must be int8 from 0 to 1"),
    "image, scaled": ("image", 0.7, r"image contains 0\.7, must be uint8 from 0 to 255"),
    "image, NaN": ("image", np.nan, "image contains nan, must be uint8 from 0 to 255"),
    "image, negative": ("image", -1, "image contains -1, must be uint8"),
    "image, overflow": ("image", 1e30, r"image contains 1e\+30, must be uint8"),
    "vector, overflow": (
        "vector",
        1e300,
        r"vector contains 1e\+300, must be float32 from -3\.4.*e\+38 to 3\.4",
    ),
    "vector, complex": (
        "vector",
        1j,
        "vector must have shape \\[2, 3\\] of numbers, got \\[2, 3\\] of complex128",
    ),
}


@pytest.mark.parametrize(("key", "value", "message"), INVALID.values(), ids=INVALID)
@pytest.mark.filterwarnings("error")
def test_invalid_observations_are_named(player, key, value, message):
    changed = VALID[key].astype(np.result_type(VALID[key], np.asarray(value)))
    changed.flat[0] = value
    with pytest.raises(ValueError, match=rf"observation\.{message}"):
        player.predict(VALID | {key: changed})


def test_a_missing_part_of_an_observation_is_named(player):
    with pytest.raises(ValueError, match="must be a dict with the entry 'number'"):
        player.predict({key: value for key, value in VALID.items() if key != "number"})
    with pytest.raises(ValueError, match="must be a dict with the entry"):
        player.predict(np.zeros(3))


def test_previous_actions_of_a_decision_transformer_are_in_range(tmp_path):
    agent = offline_agent(some_trajectories(action_space=OFFLINE_ACTIONS["MultiDiscrete from elsewhere"]))
    agent.export(tmp_path / "policy.onnx")
    player = Player(tmp_path / "policy.onnx")
    observation = {"observation": np.zeros(3), "return_to_go": [1.0], "time_step": [0]}
    player.predict(observation | {"previous_action": [-1, 6]})
    with pytest.raises(ValueError, match=r"previous_action contains 7, must be int64 from 4 to 6"):
        player.predict(observation | {"previous_action": [-1, 7]})
    with pytest.raises(ValueError, match=r"time_step contains 0\.5, must be int64 from"):
        player.predict(observation | {"previous_action": [-1, 6], "time_step": [0.5]})
    with pytest.raises(ValueError, match=r"observation must have shape \[1, 3\], got a dict: flatten it"):
        player.predict(observation | {"previous_action": [-1, 6], "observation": {"a": np.zeros(3)}})
    for parts in [(1, np.zeros(2)), ((1, np.zeros(2)), 1), ({"a": 1}, 2, 3)]:
        with pytest.raises(ValueError, match=r"must have shape \[1, 3\], got a tuple: flatten it"):
            player.predict(observation | {"previous_action": [-1, 6], "observation": parts})
    for numbers in [(0, 0, 0), ((0, 0, 0),), (np.zeros(3),)]:
        player.predict(observation | {"previous_action": [-1, 6], "observation": numbers})


def test_the_encoding_of_the_locale_is_not_used(exported):
    code = "import onnx_player; onnx_player.Player('policy.onnx')"
    options = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning:onnx_player"]
    command = [sys.executable, *options, "-c", code]
    result = subprocess.run(command, cwd=exported, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
