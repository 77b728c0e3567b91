""""""

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.env_checker import check_env as check_env_sb3

from rlxf.envs import TMaze
from rlxf.envs.tmaze import DOWN, LEFT, RIGHT, UP

STEPS = {RIGHT: (1, 0), UP: (0, 1), LEFT: (-1, 0), DOWN: (0, -1)}


def with_goal(goal: int, **kwargs) -> tuple[TMaze, np.ndarray]:
    """Return a maze after a reset, with the goal in the arm ``goal``, and its first observation."""
    env = TMaze(**kwargs)
    for seed in range(100):
        observation, _ = env.reset(seed=seed)
        if env._goal == goal:
            return env, observation
    raise AssertionError(f"no goal {goal} in 100 seeds")


def walk(env: TMaze, actions: list[int]) -> list[tuple]:
    return [env.step(action) for action in actions]


def to_the_end(corridor_length: int, active: bool, last: int) -> list[int]:
    return [LEFT] * active + [RIGHT] * (corridor_length + active) + [last]


def reference(
    corridor_length: int, active: bool, penalty: float, rule: str, goal: int, actions: list[int]
) -> list[tuple]:
    """Compute (observation, reward, terminated, success) of reset and each step from coordinates."""
    start = 1 if active else 0
    junction, horizon = start + corridor_length, corridor_length + 1 + 2 * start
    floor = {(x, 0) for x in range(junction + 1)} | {(junction, 1), (junction, -1)}
    x, y, hint_shown = start, 0, False
    rows: list[tuple] = []
    for t in range(horizon + 1):
        west, due = x, not hint_shown
        if t > 0:
            dx, dy = STEPS[actions[t - 1]]
            x, y = (x + dx, y + dy) if (x + dx, y + dy) in floor else (x, y)
        idle = x < t - start if rule == "schedule" else not (x == west + 1 or (x == 0 and due))
        hint = goal if x == 0 and not hint_shown else y
        hint_shown = hint_shown or x == 0
        success = t == horizon and y == goal
        reward = float(success) if t == horizon else penalty * idle
        rows.append(([float(x == junction), float(hint)], reward, t == horizon, success))
    return rows


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("render_mode", [None, "ansi", "rgb_array"])
def test_gymnasium_and_sb3_env_checkers_pass(active, render_mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env_id = "rlxf/TMazeActive-v0" if active else "rlxf/TMaze-v0"
        env = gymnasium.make(env_id, corridor_length=3, render_mode=render_mode).unwrapped
        check_env(env)
        check_env_sb3(env)


@given(
    corridor_length=st.integers(1, 6),
    active=st.booleans(),
    penalty=st.none() | st.floats(-1, 0),
    rule=st.sampled_from(["step", "schedule"]),
    seed=st.integers(0, 50),
    data=st.data(),
)
def test_any_walk_matches_the_reference(corridor_length, active, penalty, rule, seed, data):
    env = TMaze(corridor_length, active, penalty, rule)
    observation, _ = env.reset(seed=seed)
    horizon = corridor_length + (3 if active else 1)
    actions = data.draw(st.lists(st.integers(0, 3), min_size=horizon, max_size=horizon))
    step_penalty = -1 / (horizon - 1) if penalty is None else penalty
    first, *rows = reference(corridor_length, active, step_penalty, rule, env._goal, actions)
    assert observation.tolist() == first[0]
    for action, (expected, expected_reward, end, success) in zip(actions, rows, strict=True):
        observation, reward, terminated, truncated, info = env.step(action)
        assert observation.tolist() == expected
        assert reward == pytest.approx(expected_reward)
        assert (terminated, truncated, info) == (end, False, {"is_success": success})


@pytest.mark.parametrize(
    ("actions", "arms"),
    [([RIGHT, UP, DOWN, DOWN], [0, 1, 0, -1]), ([RIGHT, DOWN, RIGHT, UP], [0, -1, -1, 0])],
)
def test_arms_are_entered_and_left_vertically(actions, arms):
    env, _ = with_goal(1, corridor_length=1, active=True)
    assert [row[0][1] for row in walk(env, actions)] == arms


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("goal", [-1, 1])
@pytest.mark.parametrize("length", [1, 2, 50])
def test_best_walk_follows_the_hint_and_returns_one(active, goal, length):
    env, first = with_goal(goal, corridor_length=length, active=active)
    rows = walk(env, to_the_end(length, active, UP if goal == 1 else DOWN))
    hint = rows[0][0] if active else first
    assert hint.tolist() == [0.0, goal]
    assert [row[1] for row in rows] == [0.0] * (len(rows) - 1) + [1.0]
    assert [row[4]["is_success"] for row in rows] == [False] * (len(rows) - 1) + [True]


@pytest.mark.parametrize("last", [UP, DOWN])
def test_success_without_memory_of_the_hint_is_one_half(last):
    walks = [walk(with_goal(goal, corridor_length=5)[0], to_the_end(5, False, last)) for goal in (-1, 1)]
    assert sum(rows[-1][4]["is_success"] for rows in walks) == 1
    up, down = ([row[0].tolist() for row in rows] for rows in walks)
    assert up == down, "observations after the first must not depend on the goal"


def test_hint_is_not_observed_without_a_visit_of_the_oracle():
    walks = [walk(with_goal(goal, corridor_length=4, active=True)[0], [RIGHT] * 6) for goal in (-1, 1)]
    assert all(row[0][1] == 0 for rows in walks for row in rows)


def test_goals_are_drawn_with_equal_probability():
    env = TMaze(corridor_length=1)
    env.reset(seed=0)
    goals = [env.reset()[0][1] for _ in range(400)]
    assert set(goals) == {-1.0, 1.0}
    assert abs(sum(goals)) < 80  # four standard deviations


def test_penalties_of_a_passive_agent_that_never_moves_sum_to_minus_one():
    env, _ = with_goal(1, corridor_length=7)
    assert sum(row[1] for row in walk(env, [LEFT] * 8)) == pytest.approx(-1)


def test_ansi_rendering_has_oracle_goal_and_agent():
    env, _ = with_goal(-1, corridor_length=3, render_mode="ansi")
    assert env.render() == "   .\nA...\n   G"
    walk(env, [RIGHT, RIGHT, RIGHT, DOWN])
    assert env.render() == "   .\nO...\n   A"


def test_rgb_rendering_follows_the_agent():
    env, _ = with_goal(1, corridor_length=3, active=True, render_mode="rgb_array")
    before = env.render()
    walk(env, [RIGHT])
    assert before.shape == (24, 5 * 8, 3)
    assert (before != env.render()).any(axis=2).sum() == 2 * 8 * 8


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"corridor_length": 0}, "corridor_length.*0"),
        ({"corridor_length": 2.5}, "corridor_length.*2.5"),
        ({"corridor_length": True}, "corridor_length.*True"),
        ({"active": 10**9}, "active must be True or False, got 1000000000"),
        ({"active": "3"}, "active.*'3'"),
        ({"penalty": 0.1}, "penalty.*0.1"),
        ({"penalty": "-1"}, "penalty.*'-1'"),
        ({"penalty": False}, "penalty.*False"),
        ({"penalty_rule": "late"}, "penalty_rule.*late"),
        ({"penalty": float("nan")}, "penalty.*nan"),
        ({"penalty": float("-inf")}, "penalty.*-inf"),
        ({"render_mode": "human"}, "render_mode.*human"),
    ],
)
def test_invalid_argument_raises(kwargs, expected):
    with pytest.raises(ValueError, match=expected):
        TMaze(**kwargs)


@pytest.mark.parametrize("action", [4, -1, 0.5])
def test_invalid_action_raises(action):
    env, _ = with_goal(1)
    with pytest.raises(ValueError, match=str(action)):
        env.step(action)


def test_step_requires_a_reset_before_and_after_an_episode():
    env = TMaze(corridor_length=1)
    with pytest.raises(ResetNeeded):
        env.step(RIGHT)
    env.reset(seed=0)
    walk(env, [RIGHT, UP])
    with pytest.raises(ResetNeeded):
        env.step(RIGHT)
