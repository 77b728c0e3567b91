"""Tests of the vector T-Maze against single environments of Gymnasium."""

import json
import subprocess
import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

from rlxf.envs import TMaze, TMazeVector
from rlxf.envs.tmaze import DOWN, RIGHT, UP

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP]


def assert_same(actual: Any, expected: Any) -> None:
    """Assert equal types, shapes, dtypes and values of nested dicts, tuples and arrays."""
    assert type(actual) is type(expected)
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        actual, expected = list(actual.values()), [expected[key] for key in actual]
    if isinstance(actual, np.ndarray) and actual.dtype != object:
        np.testing.assert_array_equal(actual, expected, strict=True)
        return
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)


@pytest.mark.thorough
@given(
    num_envs=st.integers(1, 4),
    corridor_length=st.integers(1, 4),
    active=st.booleans(),
    rule=st.sampled_from(["step", "schedule"]),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 1000),
)
def test_vector_environment_equals_single_environments(num_envs, corridor_length, active, rule, mode, seed):
    batch = TMazeVector(num_envs, corridor_length, active, penalty_rule=rule, autoreset_mode=mode)
    single = partial(TMaze, corridor_length, active, penalty_rule=rule)
    loop = SyncVectorEnv([single] * num_envs, autoreset_mode=mode)
    assert_same(batch.reset(seed=seed), loop.reset(seed=seed))
    for actions in np.random.default_rng(seed).integers(0, 4, (30, num_envs)):
        assert_same(batch.step(actions), loop.step(actions))


@pytest.mark.parametrize("mode", MODES)
def test_success_equals_that_of_single_environments(mode):
    """Random walks rarely succeed, so all agents walk to the upper arm here."""
    batch = TMazeVector(8, 2, autoreset_mode=mode)
    loop = SyncVectorEnv([partial(TMaze, 2)] * 8, autoreset_mode=mode)
    batch.reset(seed=3)
    loop.reset(seed=3)
    fillers = [RIGHT] * (mode is AutoresetMode.NEXT_STEP)
    returns = np.zeros(8)
    for action in [RIGHT, RIGHT, UP, *fillers, RIGHT, RIGHT, DOWN]:
        actual, expected = batch.step(np.full(8, action)), loop.step(np.full(8, action))
        assert_same(actual, expected)
        returns += actual[1]
    assert 0 < returns.sum() < 16


def goals(env: TMazeVector, episodes: int, **reset: Any) -> np.ndarray:
    """Return the hint of each environment in consecutive episodes, (episodes, N)."""
    hints = [env.reset(**reset)[0][:, 1]]
    while len(hints) < episodes:
        observation, _, ended, _, _ = env.step(np.zeros(env.num_envs, dtype=np.int64))
        if ended.all():
            hints.append(observation[:, 1])
    return np.array(hints)


def test_goals_depend_on_the_seed_but_not_on_the_number_of_environments():
    two, five = TMazeVector(2, 1), TMazeVector(5, 1)
    np.testing.assert_array_equal(goals(two, 20, seed=11), goals(five, 20, seed=11)[:, :2])
    np.testing.assert_array_equal(goals(two, 20, seed=[14, 11]), goals(five, 20, seed=11)[:, [3, 0]])
    assert (goals(two, 20, seed=11) != goals(two, 20, seed=12)).any()


def test_reset_without_seed_keeps_the_generators():
    env = TMazeVector(2, 1)
    whole = goals(env, 20, seed=5)
    parts = np.concatenate([goals(env, 10, seed=5), goals(env, 10)])
    np.testing.assert_array_equal(whole, parts)
    kept = np.concatenate([goals(env, 10, seed=5), goals(env, 10, seed=[None, 6])])
    np.testing.assert_array_equal(kept[:, 0], whole[:, 0])
    np.testing.assert_array_equal(kept[10:, 1], whole[:10, 1])  # seed 6 was the first seed of environment 1


def test_make_vec_sets_the_autoreset_mode():
    env = gymnasium.make_vec("rlxf/TMazeActive-v0", 3, corridor_length=4, autoreset_mode="NextStep")
    assert isinstance(env, TMazeVector)
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert env.rules.active
    assert gymnasium.make_vec("rlxf/TMaze-v0").metadata["autoreset_mode"] is AutoresetMode.SAME_STEP


def test_returned_arrays_do_not_change_later():
    env = TMazeVector(2, 2)
    first, _ = env.reset(seed=0)
    copy = first.copy()
    env.step(np.array([RIGHT, RIGHT]))
    np.testing.assert_array_equal(first, copy)


@pytest.mark.parametrize("render_mode", ["ansi", "rgb_array"])
def test_rendering_equals_that_of_single_environments(render_mode):
    batch = TMazeVector(3, 2, render_mode=render_mode)
    loop = SyncVectorEnv([partial(TMaze, 2, render_mode=render_mode)] * 3)
    batch.reset(seed=1)
    loop.reset(seed=1)
    for actual, expected in zip(batch.render(), loop.render(), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_envs": 0}, "num_envs.*0"),
        ({"corridor_length": -3}, "corridor_length.*-3"),
        ({"autoreset_mode": AutoresetMode.DISABLED}, "DISABLED"),
        ({"autoreset_mode": "same"}, "'same'"),
        ({"render_mode": "human"}, "human"),
    ],
)
def test_invalid_argument_raises(kwargs, message):
    with pytest.raises(ValueError, match=message):
        TMazeVector(**kwargs)


@pytest.mark.parametrize("actions", [[0], [0, 4], [-1, 0], [0.0, 1.0], [[0, 1]]])
def test_invalid_actions_raise(actions):
    env = TMazeVector(2)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="2 integers from 0 to 3"):
        env.step(actions)


def test_wrong_number_of_seeds_raises():
    with pytest.raises(ValueError, match="3 seeds, got 2"):
        TMazeVector(3).reset(seed=[1, 2])


def test_step_requires_a_reset():
    with pytest.raises(ResetNeeded):
        TMazeVector(1).step([0])


@pytest.mark.parametrize("steps", [0, 3, 7, 11])
def test_loaded_state_continues_equally(steps):
    actions = np.random.default_rng(1).integers(4, size=(30, 5))
    env = TMazeVector(5, corridor_length=4, active=True)
    env.reset(seed=2)
    for action in actions[:steps]:
        env.step(action)
    other = TMazeVector(5, corridor_length=4, active=True)
    other.load_state(json.loads(json.dumps(env.state())))
    for action in actions[steps:]:
        (expected, *expected_rest, _), (actual, *rest, _) = env.step(action), other.step(action)
        assert np.array_equal(actual, expected)
        assert all(map(np.array_equal, rest, expected_rest))


def test_vector_environment_is_made_without_torch():
    code = (
        "import sys, gymnasium, rlxf; gymnasium.make_vec('rlxf/TMaze-v0', 2).reset(seed=0); "
        "print({'torch', 'stable_baselines3'} & set(sys.modules))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout == "set()\n"
