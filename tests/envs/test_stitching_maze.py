"""Tests of the stitching maze: its map, its rewards, and data that need stitching."""

import warnings
from collections import deque

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_sb3

from rlxf.envs import RoadFollower, StitchingMaze, make_vec_env, road_episodes
from rlxf.envs.stitching_data import point_ahead
from rlxf.envs.stitching_maze import (
    ARM,
    DIRECTIONS,
    GOAL,
    HALF_WIDTH,
    HOOK,
    ROADS,
    STARTS,
    STEP,
    nearest_on_roads,
)

IDS = {True: "rlxf/StitchingMaze-v0", False: "rlxf/StitchingMazeDiscrete-v0"}
KINDS = pytest.mark.parametrize("continuous", [True, False], ids=["continuous", "discrete"])
CORNER = (STARTS["northwest"], (-ARM, ARM), (-ARM, 0.0), (0.0, 0.0), GOAL)
"""The road from the start to the goal, which no episode of the data follows."""


def is_on_roads(x, y):
    """Return whether a position is on one of the roads, by their definition."""
    edge = ARM + HALF_WIDTH
    crossing = (abs(x) <= edge and abs(y) <= HALF_WIDTH) or (abs(y) <= edge and abs(x) <= HALF_WIDTH)
    west = abs(x + ARM) <= HALF_WIDTH and -HALF_WIDTH <= y <= edge
    return crossing or west or (-edge <= x <= HOOK - ARM + HALF_WIDTH and abs(y - ARM) <= HALF_WIDTH)


@KINDS
@pytest.mark.parametrize("render_mode", [None, "ansi", "rgb_array"])
def test_gymnasium_and_sb3_env_checkers_pass(continuous, render_mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(IDS[continuous], render_mode=render_mode).unwrapped
        check_env(env)
        check_env_sb3(env)


@KINDS
def test_a_random_walk_stays_on_the_roads(continuous):
    env, rng = StitchingMaze(continuous), np.random.default_rng(0)
    env.action_space.seed(0)
    before, _ = env.reset(seed=0)
    for _ in range(2000):
        after, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert is_on_roads(*after)
        assert np.abs(after - before).max() < 2 * STEP, "more than the step and its way back to the roads"
        in_goal = bool(np.abs(after - GOAL).max() <= HALF_WIDTH)
        assert (reward, terminated, truncated) == (float(in_goal), in_goal, False)
        assert info["is_success"] == in_goal
        before = after
        if terminated:
            before, _ = env.reset(options={"start": rng.choice([*STARTS])})


def test_a_step_off_the_roads_ends_at_the_nearest_point():
    rng = np.random.default_rng(1)
    edge = ARM + HALF_WIDTH
    line = np.linspace(-edge, edge, 181)
    grid = np.array([(x, y) for x in line for y in line if is_on_roads(x, y)])
    for point in rng.uniform(-edge, edge, (200, 2)):
        nearest = nearest_on_roads(point)
        assert is_on_roads(*nearest)
        closest = np.abs(grid - point).sum(axis=1).min()
        assert np.abs(nearest - point).sum() <= closest + 1e-9


def test_a_position_on_the_roads_is_its_own_nearest_point():
    for point in [(0.3, 0.2), (-4.5, 0.5), (0.5, -3.0), (4.0, -0.1)]:
        np.testing.assert_array_equal(nearest_on_roads(np.array(point)), point)


def test_a_shortest_path_of_discrete_actions_reaches_the_goal():
    """Breadth-first search over the positions from the center of the start."""
    first = STARTS["northwest"]
    steps, queue = {first: 0}, deque([first])
    while queue:
        position = queue.popleft()
        for direction in DIRECTIONS:
            after = tuple(nearest_on_roads(np.array(position) + STEP * direction).tolist())
            if after not in steps:
                steps[after] = steps[position] + 1
                queue.append(after)
    shortest = min(n for at, n in steps.items() if np.abs(np.subtract(at, GOAL)).max() <= HALF_WIDTH)
    assert shortest == 18, "10 units along the inner sides of the corners, less two steps by cutting two"
    assert shortest < gymnasium.spec(IDS[False]).max_episode_steps / 2


@KINDS
def test_a_follower_of_the_missing_road_reaches_the_goal(continuous):
    env, follower = gymnasium.make(IDS[continuous]), RoadFollower(CORNER, 0.3, np.random.default_rng(0))
    for seed in range(20):
        position, info = env.reset(seed=seed)
        ended = False
        while not ended:
            action = env.unwrapped.action_towards(follower(position.astype(np.float64)))
            position, reward, terminated, truncated, info = env.step(action)
            ended = terminated or truncated
        assert info["is_success"]
        assert reward == 1


def test_the_start_is_near_its_center_and_set_by_the_seed():
    env = StitchingMaze()
    for start, center in STARTS.items():
        first, _ = env.reset(seed=4, options={"start": start})
        assert 0 < np.abs(first - np.array(center)).max() <= 0.25
        again, _ = env.reset(seed=4, options={"start": start})
        np.testing.assert_array_equal(first, again)
        other, _ = env.reset(seed=5, options={"start": start})
        assert (first != other).any()
    assert np.abs(env.reset(seed=0)[0] - np.array(STARTS["northwest"])).max() <= 0.25


def test_invalid_uses_are_refused():
    env = StitchingMaze(continuous=False)
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(0)
    with pytest.raises(ValueError, match="start must be one of northwest, south, got 'north'"):
        env.reset(options={"start": "north"})
    env.reset()
    with pytest.raises(ValueError, match=r"action must be in Discrete\(4\), got 4"):
        env.step(4)
    with pytest.raises(ValueError, match="render_mode must be None or one of"):
        StitchingMaze(render_mode="human")


def test_the_goal_ends_the_episode():
    env = StitchingMaze()
    first, _ = env.reset(seed=0, options={"start": "south"})
    steps = 1
    while not env.step(np.array([0, 1], np.float32))[2]:
        steps += 1
    assert steps == np.ceil((GOAL[1] - HALF_WIDTH - first[1]) / STEP)
    with pytest.raises(ResetNeeded):
        env.step(np.array([0, 1], np.float32))


def test_the_time_limit_truncates_the_episode():
    env = make_vec_env(IDS[False], 1, 0)
    env.reset()
    for t in range(1, 41):
        _, rewards, dones, infos = env.step(np.array([2]))
        assert dones[0] == (t == 40)
    assert infos[0]["TimeLimit.truncated"]
    assert rewards[0] == 0


def test_walking_towards_the_goal_from_the_start_ends_at_a_wall():
    env = StitchingMaze()
    env.reset(seed=0)
    for _ in range(10):
        position = env.step(np.array([1, 0], np.float32))[0]
    np.testing.assert_allclose(position[0], HOOK - ARM + HALF_WIDTH)
    for action in ([1, 1], [1, -1], [0, 1], [0, -1]):
        assert abs(env.step(np.array(action, np.float32))[0][0] - (HOOK - ARM + HALF_WIDTH)) <= STEP


def test_the_map_is_rendered():
    env = StitchingMaze(render_mode="ansi")
    env.reset(seed=0)
    lines = env.render().split("\n")
    assert lines == [".A  G    ", *[".   .    "] * 3, "." * 9, *["    .    "] * 4]
    env = StitchingMaze(render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().shape == (72, 72, 3)


def slow_point_ahead(road, position, distance):
    """Return the point a distance beyond the nearest one of 20,001 points of a road."""
    road = np.asarray(road, np.float64)
    along = np.append(0, np.linalg.norm(np.diff(road, axis=0), axis=1).cumsum())
    places = np.linspace(0, along[-1], 20_001)
    points = np.stack([np.interp(places, along, road[:, i]) for i in (0, 1)], axis=1)
    nearest = places[np.linalg.norm(points - position, axis=1).argmin()]
    return np.array([np.interp(nearest + distance, along, road[:, i]) for i in (0, 1)])


@pytest.mark.parametrize("road", [*ROADS.values(), CORNER, ((0, 0), (1, 0), (1, 2), (3, 2))])
def test_the_point_ahead_is_that_of_a_search_along_the_road(road):
    for position in np.random.default_rng(2).uniform(-4, 4, (50, 2)):
        found = point_ahead(np.asarray(road, np.float64), position, 1.0)
        np.testing.assert_allclose(found, slow_point_ahead(road, position, 1.0), atol=1e-3)


def test_the_policy_walks_to_the_end_of_the_road_and_stays():
    follower, position = RoadFollower(CORNER, 0.0, np.random.default_rng(0)), np.array(STARTS["northwest"])
    for _ in range(60):
        position = position + STEP * follower(position)
    np.testing.assert_allclose(position, GOAL, atol=1e-6)


def test_invalid_roads_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="at least two corners"):
        RoadFollower([(0.0, 0.0)], 0.1, rng)
    with pytest.raises(ValueError, match="noise must be at least 0, got -1"):
        RoadFollower(CORNER, -1, rng)
    with pytest.raises(ValueError, match=r"episodes must be at least 4, .* got 3"):
        road_episodes(3)


@KINDS
def test_no_episode_of_the_data_connects_start_and_goal(continuous):
    data = road_episodes(60, 1, continuous)
    places = np.split(data.observations, data.offsets[1:-1])
    from_start = np.array([np.abs(each[0] - np.array(STARTS["northwest"])).max() <= 0.25 for each in places])
    assert from_start.sum() == 45
    assert (data.returns[from_start] == 0).all()
    assert (data.returns[~from_start] == 1).all()
    assert (data.terminated == ~from_start).all()
    assert (data.truncated == from_start).all()
    for each, starts_west in zip(places, from_start, strict=True):
        assert (np.abs(each).max(axis=1) < 1.5).any(), "the episode does not pass the crossing"
        turns = (each[:, 1] > 1.5) & (np.abs(each[:, 0]) <= HALF_WIDTH)
        assert turns.any() != starts_west, "only episodes from the south turn to the goal"


@KINDS
def test_seeds_determine_the_data(continuous):
    one, same, other = (road_episodes(6, seed, continuous) for seed in (3, 3, 4))
    for name in ("observations", "actions", "rewards", "offsets"):
        np.testing.assert_array_equal(getattr(one, name), getattr(same, name))
    assert (
        one.observations.shape != other.observations.shape or (one.observations != other.observations).any()
    )


@KINDS
def test_recorded_actions_lead_to_the_recorded_positions(continuous):
    data = road_episodes(4, 0, continuous)
    actions = data.actions if continuous else DIRECTIONS[data.actions]
    inner = np.setdiff1d(np.arange(data.steps - 1), data.offsets[1:] - 1)
    for t in inner:
        expected = nearest_on_roads(data.observations[t] + STEP * actions[t].astype(np.float64))
        np.testing.assert_allclose(data.observations[t + 1], expected, atol=1e-5)
