"""A maze of two crossing roads, whose episodes must be combined to reach the goal."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from rlxf.envs.tmaze import PIXELS, check_render_mode

Point = NDArray[np.float64]
Road = Sequence[tuple[float, float]]
"""Corners of a road, from its start to its end."""

ARM = 4.0
"""Distance of the ends and of the corners of the roads from the crossing, along each axis."""
HOOK = 1.0
"""Length of the first part of the road from the northwest, which leads away from the goal."""
HALF_WIDTH = 0.5
"""Half of the width of a road."""
STEP = 0.5
"""Distance of a step with the action 1 along an axis."""
GOAL = (0.0, ARM)
"""Center of the goal, a square of the width of the road."""
ROADS: dict[str, Road] = {
    "northwest": ((HOOK - ARM, ARM), (-ARM, ARM), (-ARM, 0.0), (ARM, 0.0)),
    "south": ((0.0, -ARM), GOAL),
}
"""Road of the data by the name of its start: to a dead end from the northwest, to the goal from the south."""
STARTS = {name: road[0] for name, road in ROADS.items()}
"""Center of each start by its name."""
EDGE = ARM + HALF_WIDTH
LOW = np.array([(-EDGE, -HALF_WIDTH), (-HALF_WIDTH, -EDGE), (-EDGE, -HALF_WIDTH), (-EDGE, ARM - HALF_WIDTH)])
HIGH = np.array(
    [(EDGE, HALF_WIDTH), (HALF_WIDTH, EDGE), (HALF_WIDTH - ARM, EDGE), (HOOK - ARM + HALF_WIDTH, EDGE)]
)
"""Southwest and northeast corners of the straight pieces of the roads, (4, 2)."""
DIRECTIONS = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)], np.float64)
"""Displacement by discrete action, in steps: 0 right, 1 up, 2 left, 3 down."""


class StitchingMaze(gymnasium.Env[NDArray[np.float32], Any]):
    r"""Two crossing roads, each of which is the whole of an episode of the data.

    ::

        +-A   G         A start of an episode, and of the evaluation
        |     |         B start of other episodes of the data
        +-----+-----D   D dead end
              |         G goal
              B

    Episodes of the data (`rlxf.envs.road_episodes`) go from A to D, or from B to G. No episode goes from A to
    G. An agent that starts in A reaches G only if it joins the first part of one road and the second part of
    the other (trajectory stitching: Fu et al. 2020, arXiv:2004.07219, section 4). The road from A first leads
    away from the goal. A policy that only learned the road from B to G steers towards the latter, and stays
    at the wall next to A.

    Observation, float32 (2,): the position (x, y). The crossing is at (0, 0), A at (-3, 4), the corners at
    (-4, 4) and (-4, 0), and the other ends are at a distance of 4 from the crossing. The roads are 1 wide.

    Actions: a displacement in [-1, 1]^2 in units of half a road width, or with ``continuous=False`` 0 right,
    1 up, 2 left, 3 down. A step that would leave the roads ends at the nearest point of the roads, so an
    agent can cut corners.

    The reward is 1 when the agent enters the square of the goal, which terminates the episode, and 0
    otherwise. The registered environments truncate episodes after 40 steps. ``info["is_success"]`` is True
    in the goal.

    Args:
        continuous: False for discrete actions.
        render_mode: None, "ansi" (text) or "rgb_array" (uint8 (H, W, 3)).

    Raises:
        ValueError: if render_mode is unknown, an action is not in the space, or a start is unknown.
        gymnasium.error.ResetNeeded: from `step`, before the first reset or after the goal.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 10}  # noqa: RUF012 - as in Gymnasium

    def __init__(self, continuous: bool = True, render_mode: str | None = None):
        check_render_mode(render_mode)
        self.continuous, self.render_mode = continuous, render_mode
        self.observation_space = spaces.Box(-EDGE, EDGE, (2,), np.float32)
        box = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = box if continuous else spaces.Discrete(len(DIRECTIONS))
        self._position: Point | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Put the agent near a start: at a uniform random offset of at most 0.25 along each axis.

        Args:
            seed: seed of the offsets; None to continue.
            options: ``{"start": "south"}`` for the start B; by default, episodes start in A, "northwest".
        """
        super().reset(seed=seed)
        start = (options or {}).get("start", "northwest")
        if start not in STARTS:
            raise ValueError(f"start must be one of {', '.join(STARTS)}, got {start!r}")
        self._position = np.array(STARTS[start]) + self.np_random.uniform(-0.25, 0.25, 2)
        return self._position.astype(np.float32), {"is_success": False}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Move the agent; the class docstring describes the rewards."""
        if self._position is None:
            raise ResetNeeded("there is no running episode: call reset() before step()")
        if not self.action_space.contains(action):
            raise ValueError(f"action must be in {self.action_space}, got {action!r}")
        displacement = np.asarray(action, np.float64) if self.continuous else DIRECTIONS[action]
        position = nearest_on_roads(self._position + STEP * displacement)
        success = bool(np.abs(position - GOAL).max() <= HALF_WIDTH)
        self._position = None if success else position
        return position.astype(np.float32), float(success), success, False, {"is_success": success}

    def action_towards(self, displacement: Point) -> Any:
        """Return the action of the environment that is nearest to a displacement (2,) in steps."""
        if self.continuous:
            return displacement.clip(-1, 1).astype(np.float32)
        return int(np.argmax(DIRECTIONS @ displacement))

    def render(self) -> str | NDArray[np.uint8] | None:
        """Render the roads, the goal and the agent according to ``render_mode``."""
        if self.render_mode is None:
            gymnasium.logger.warn("render() does nothing without render_mode='ansi' or 'rgb_array'")
            return None
        return render_roads(self.render_mode, GOAL if self._position is None else self._position)


def nearest_on_roads(point: Point) -> Point:
    """Return the point of the roads that is nearest to a point (2,), in the sum of both coordinates."""
    candidates = point.clip(LOW, HIGH)
    nearest: Point = candidates[np.abs(candidates - point).sum(axis=1).argmin()]
    return nearest


WALL, FLOOR, TARGET, AGENT = range(4)
"""Contents of a square of the width of a road, as indices of `SYMBOLS` and `COLORS`."""
SYMBOLS = np.array(list(" .GA"))
COLORS = np.array([(40, 40, 40), (230, 230, 230), (90, 180, 90), (220, 80, 60)], dtype=np.uint8)


def render_roads(mode: str, position: Sequence[float] | Point) -> str | NDArray[np.uint8]:
    """Render the maze with the agent at a position, in a render mode of `StitchingMaze`.

    Returns:
        For "ansi", nine lines of nine characters: G goal, A agent, ``.`` road, space wall. For "rgb_array",
        an RGB image, uint8 (72, 72, 3).
    """
    arm = int(ARM)
    grid = np.full((2 * arm + 1, 2 * arm + 1), WALL)
    grid[arm] = FLOOR
    grid[:, arm] = FLOOR
    grid[:arm, 0] = FLOOR
    grid[0, : int(HOOK) + 1] = FLOOR
    grid[0, arm] = TARGET
    column, row = np.rint(position).astype(np.int64) * (1, -1) + arm
    grid[row, column] = AGENT
    if mode == "ansi":
        return "\n".join("".join(line) for line in SYMBOLS[grid])
    return COLORS[grid].repeat(PIXELS, axis=0).repeat(PIXELS, axis=1)
