"""Data of the stitching maze: a behavior policy that follows a road, and episodes along each road."""

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rlxf.data import Trajectories, return_to_go
from rlxf.envs.specs import register_envs
from rlxf.envs.stitching_maze import ROADS, STEP, Point, Road, StitchingMaze

ENV_IDS = {True: "rlxf/StitchingMaze-v0", False: "rlxf/StitchingMazeDiscrete-v0"}
"""Registered id by the argument ``continuous``."""
PERIOD = 4
"""Number of episodes of which one reaches the goal."""
LOOKAHEAD = 1.0
"""Distance of the point of the road that a `RoadFollower` walks towards."""


class RoadFollower:
    """Behavior policy ``u = (p - x) / |p - x| + noise``, the displacement in steps at position x.

    p is the point of the road that lies a distance of 1 beyond the point nearest to x, or the end of the
    road. Within one step of the end, u = (p - x) / 0.5 + noise. The noise is Gaussian. The policy has no
    state.

    Args:
        road: corners of the road, at least two, from its start to its end.
        noise: standard deviation of the noise, in steps.
        rng: generator of the noise.

    Raises:
        ValueError: if the road has fewer than two corners, or noise is negative.
    """

    def __init__(self, road: Road, noise: float, rng: np.random.Generator):
        if len(road) < 2:
            raise ValueError(f"road must have at least two corners, got {road!r}")
        if not noise >= 0:
            raise ValueError(f"noise must be at least 0, got {noise}")
        self.road = np.asarray(road, np.float64)
        self.noise = noise
        self.rng = rng

    def __call__(self, position: Point) -> Point:
        """Return the displacement (2,) in steps at a position (2,)."""
        offset = point_ahead(self.road, position, LOOKAHEAD) - position
        wanted = offset / max(float(np.linalg.norm(offset)), STEP)
        return wanted + self.noise * self.rng.normal(size=2)


def point_ahead(road: NDArray[np.float64], position: Point, distance: float) -> Point:
    """Return the point of a road (N, 2) a distance beyond the point nearest to a position, or its end."""
    first, edge = road[:-1], np.diff(road, axis=0)
    lengths = np.linalg.norm(edge, axis=1)
    fraction = (((position - first) * edge).sum(axis=1) / lengths**2).clip(0, 1)
    nearest = first + fraction[:, None] * edge
    i = int(np.argmin(np.linalg.norm(nearest - position, axis=1)))
    along = np.append(0, lengths.cumsum())
    place = along[i] + fraction[i] * lengths[i] + distance
    return np.array([np.interp(place, along, road[:, axis]) for axis in range(2)])


def road_episodes(
    episodes: int = 200, seed: int = 0, continuous: bool = True, noise: float = 0.3
) -> Trajectories:
    """Generate data of `StitchingMaze` in which no episode goes from its start to its goal.

    Three of four episodes go from the northwest to the dead end, where the agent stays until the time limit,
    and every fourth one from the south to the goal. They have the returns 0 and 1.

    Args:
        episodes: number of episodes, at least 4.
        seed: seed of the starts and of the noise; equal seeds give equal data.
        continuous: False for discrete actions.
        noise: standard deviation of the noise of `RoadFollower`, in steps.

    Raises:
        ValueError: if episodes is less than 4, or noise is negative.
    """
    if episodes < PERIOD:
        raise ValueError(f"episodes must be at least {PERIOD}, so that one reaches the goal, got {episodes}")
    register_envs()
    env = gymnasium.make(ENV_IDS[continuous])
    rng = np.random.default_rng(seed)
    policies = {start: RoadFollower(road, noise, rng) for start, road in ROADS.items()}
    env.reset(seed=seed)
    starts = ["northwest" if e % PERIOD else "south" for e in range(1, episodes + 1)]
    played = [play(env, start, policies) for start in starts]
    observations, actions, rewards, ends = zip(*played, strict=True)
    rows = np.concatenate(observations)
    terminated = np.array(ends)
    return Trajectories(
        observations=rows,
        actions=np.concatenate(actions),
        rewards=np.concatenate(rewards),
        return_to_go=np.concatenate([return_to_go(each) for each in rewards]).astype(np.float32),
        offsets=np.cumsum([0, *map(len, rewards)]),
        terminated=terminated,
        truncated=~terminated,
        observation_mean=rows.mean(axis=0),
        observation_std=rows.std(axis=0),
        observation_space=env.observation_space,
        action_space=env.action_space,
        env_spec=gymnasium.spec(ENV_IDS[continuous]),
        eval_env_spec=gymnasium.spec(ENV_IDS[continuous]),
        env_ids=(ENV_IDS[continuous],),
        dataset_ids=(f"{ENV_IDS[continuous]} roads",),
    )


def play(
    env: gymnasium.Env, start: str, policies: dict[str, RoadFollower]
) -> tuple[NDArray[np.float32], NDArray[Any], NDArray[np.float32], bool]:
    """Play an episode; return observations (T, 2), actions (T, ...), rewards (T,), and if it terminated."""
    maze: Any = env.unwrapped
    assert isinstance(maze, StitchingMaze)
    position, _ = env.reset(options={"start": start})
    steps = []
    terminated = False
    truncated = False
    while not (terminated or truncated):
        action = maze.action_towards(policies[start](position.astype(np.float64)))
        following, reward, terminated, truncated, _ = env.step(action)
        steps.append((position, action, reward))
        position = following
    positions, actions, rewards = zip(*steps, strict=True)
    return np.stack(positions), np.asarray(actions), np.array(rewards, np.float32), terminated
