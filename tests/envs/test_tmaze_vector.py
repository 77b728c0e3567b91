import json
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
from rlxf.envs.tmaze_rules import DOWN, RIGHT, UP

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP]


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal in type, shape, dtype and content, through dicts, tuples and arrays of arrays."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = list(ours.values()), [theirs[key] for key in ours]
    if isinstance(ours, np.ndarray) and ours.dtype != object:
        np.testing.assert_array_equal(ours, theirs, strict=True)
        return
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other)


@given(
    num_envs=st.integers(1, 4),
    corridor_length=st.integers(1, 4),
    active=st.booleans(),
    rule=st.sampled_from(["step", "schedule"]),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 1000),
)
def test_the_batch_is_the_same_as_its_environments_one_by_one(
    num_envs, corridor_length, active, rule, mode, seed
):
    batch = TMazeVector(num_envs, corridor_length, active, penalty_rule=rule, autoreset_mode=mode)
    single = partial(TMaze, corridor_length, active, penalty_rule=rule)
    loop = SyncVectorEnv([single] * num_envs, autoreset_mode=mode)
    assert_same(batch.reset(seed=seed), loop.reset(seed=seed))
    for actions in np.random.default_rng(seed).integers(0, 4, (30, num_envs)):
        assert_same(batch.step(actions), loop.step(actions))


@pytest.mark.parametrize("mode", MODES)
def test_success_is_counted_as_in_the_environments_one_by_one(mode):
    """Random walks seldom succeed, so here everybody walks to the upper arm."""
    batch = TMazeVector(8, 2, autoreset_mode=mode)
    loop = SyncVectorEnv([partial(TMaze, 2)] * 8, autoreset_mode=mode)
    batch.reset(seed=3)
    loop.reset(seed=3)
    fillers = [RIGHT] * (mode is AutoresetMode.NEXT_STEP)
    paid = np.zeros(8)
    for action in [RIGHT, RIGHT, UP, *fillers, RIGHT, RIGHT, DOWN]:
        ours, theirs = batch.step(np.full(8, action)), loop.step(np.full(8, action))
        assert_same(ours, theirs)
        paid += ours[1]
    assert 0 < paid.sum() < 16


def goals(env: TMazeVector, episodes: int, **reset: Any) -> np.ndarray:
    """The hint of each environment in a row of episodes, (episodes, N)."""
    shown = [env.reset(**reset)[0][:, 1]]
    while len(shown) < episodes:
        observation, _, ended, _, _ = env.step(np.zeros(env.num_envs, dtype=np.int64))
        if ended.all():
            shown.append(observation[:, 1])
    return np.array(shown)


def test_goals_depend_on_the_seed_of_an_environment_not_on_their_number():
    two, five = TMazeVector(2, 1), TMazeVector(5, 1)
    np.testing.assert_array_equal(goals(two, 20, seed=11), goals(five, 20, seed=11)[:, :2])
    np.testing.assert_array_equal(goals(two, 20, seed=[14, 11]), goals(five, 20, seed=11)[:, [3, 0]])
    assert (goals(two, 20, seed=11) != goals(two, 20, seed=12)).any()


def test_a_reset_without_seed_goes_on_with_the_same_generators():
    env = TMazeVector(2, 1)
    whole = goals(env, 20, seed=5)
    parts = np.concatenate([goals(env, 10, seed=5), goals(env, 10)])
    np.testing.assert_array_equal(whole, parts)
    kept = np.concatenate([goals(env, 10, seed=5), goals(env, 10, seed=[None, 6])])
    np.testing.assert_array_equal(kept[:, 0], whole[:, 0])
    np.testing.assert_array_equal(kept[10:, 1], whole[:10, 1])  # seed 6 is environment 1's first


def test_gymnasium_makes_it_and_knows_how_it_resets():
    env = gymnasium.make_vec("rlxf/TMazeActive-v0", 3, corridor_length=4, autoreset_mode="NextStep")
    assert isinstance(env, TMazeVector)
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert env.rules.active
    assert gymnasium.make_vec("rlxf/TMaze-v0").metadata["autoreset_mode"] is AutoresetMode.SAME_STEP


def test_what_it_returned_does_not_change_later():
    env = TMazeVector(2, 2)
    first, _ = env.reset(seed=0)
    copy = first.copy()
    env.step(np.array([RIGHT, RIGHT]))
    np.testing.assert_array_equal(first, copy)


@pytest.mark.parametrize("render_mode", ["ansi", "rgb_array"])
def test_it_draws_what_its_environments_draw(render_mode):
    batch = TMazeVector(3, 2, render_mode=render_mode)
    loop = SyncVectorEnv([partial(TMaze, 2, render_mode=render_mode)] * 3)
    batch.reset(seed=1)
    loop.reset(seed=1)
    for mine, other in zip(batch.render(), loop.render(), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"num_envs": 0}, "num_envs.*0"),
        ({"corridor_length": -3}, "corridor_length.*-3"),
        ({"autoreset_mode": AutoresetMode.DISABLED}, "DISABLED"),
        ({"autoreset_mode": "same"}, "'same'"),
        ({"render_mode": "human"}, "human"),
    ],
)
def test_a_bad_argument_is_named(kwargs, named):
    with pytest.raises(ValueError, match=named):
        TMazeVector(**kwargs)


@pytest.mark.parametrize("actions", [[0], [0, 4], [-1, 0], [0.0, 1.0], [[0, 1]]])
def test_bad_actions_are_named(actions):
    env = TMazeVector(2)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="2 integers from 0 to 3"):
        env.step(actions)


def test_seeds_must_be_as_many_as_environments():
    with pytest.raises(ValueError, match="3 seeds, got 2"):
        TMazeVector(3).reset(seed=[1, 2])


def test_stepping_needs_a_reset():
    with pytest.raises(ResetNeeded):
        TMazeVector(1).step([0])


@pytest.mark.parametrize("steps", [0, 3, 7, 11])
def test_another_one_goes_on_with_the_state_as_it_would_have(steps):
    actions = np.random.default_rng(1).integers(4, size=(30, 5))
    env = TMazeVector(5, corridor_length=4, active=True)
    env.reset(seed=2)
    for action in actions[:steps]:
        env.step(action)
    other = TMazeVector(5, corridor_length=4, active=True)
    other.take_up(json.loads(json.dumps(env.state())))
    for action in actions[steps:]:
        (one, *rest, _), (another, *others, _) = env.step(action), other.step(action)
        assert np.array_equal(one, another)
        assert all(map(np.array_equal, rest, others))
