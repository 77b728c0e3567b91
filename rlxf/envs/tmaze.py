"""The T-Maze, a memory task for Gymnasium: rules, environment and rendering."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from numbers import Integral
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from rlxf.utils.checks import is_number

PenaltyRule = Literal["schedule", "step"]
MAX_CORRIDOR_LENGTH = 1_000_000
"""Largest corridor length. It bounds memory: the tables take about 60 bytes for each cell."""
RIGHT, UP, LEFT, DOWN = range(4)


@dataclass(frozen=True)
class TMazeRules:
    r"""Corridor with an oracle at its west end and a junction with two arms at its east end.

    ::

        O--S- ... -J    O oracle, at column 0        active:  S is one column east of O
                   |    J junction, at column S + L  passive: S is O
                           with one arm above it (+1) and one below (-1)

    The goal is one of the arms, drawn with equal probability. The oracle shows it at the first visit only.
    An episode lasts exactly T steps, the length of the shortest path from the start via the oracle to the
    goal. The rewards are

        ``r_t = penalty * [step t was idle]``  for t < T,
        ``r_T = [the agent is in the goal's arm]``.

    The argument penalty_rule defines which steps are idle:

    - "schedule" (the paper's): steps after which ``column < t - S``, so the agent lags behind the shortest
      path. It cannot catch up: after the first wrong step, all actions get the same penalty. An untrained
      agent therefore learns from only one or two steps of each episode.
    - "step": steps that lead neither east nor to the hint. Each step has an informative reward.

    The best return is 1 under both rules, for the same path. Without memory of the hint, the success rate
    is at most 0.5.

    Source: Ni et al. 2023, arXiv:2307.03864, Passive and Active T-Maze.

    Args:
        corridor_length: L, steps from the start to the junction; at least 1.
        active: if False, the agent starts on the oracle (T = L + 1). If True, the oracle is one step west of
            the start (T = L + 3), so the agent must fetch the hint first.
        penalty: reward of each idle step; at most 0. None means -1 / (T - 1), the paper's value: the
            penalties of a passive agent that never moves sum to -1.
        penalty_rule: definition of idle steps, "schedule" or "step".

    Raises:
        ValueError: if corridor_length is not an integer from 1 to 1,000,000, active is not a bool, penalty is
            not a finite number of at most 0, or penalty_rule is unknown.
    """

    corridor_length: int = 50
    active: bool = False
    penalty: float | None = None
    penalty_rule: PenaltyRule = "schedule"

    def __post_init__(self) -> None:
        if not is_number(self.corridor_length, Integral) or self.corridor_length < 1:
            raise ValueError(f"corridor_length must be an integer >= 1, got {self.corridor_length!r}")
        if self.corridor_length > MAX_CORRIDOR_LENGTH:
            raise ValueError(
                f"corridor_length must be at most {MAX_CORRIDOR_LENGTH:,}, got {self.corridor_length!r}"
            )
        if not isinstance(self.active, bool | np.bool_):
            raise ValueError(f"active must be True or False, got {self.active!r}")
        penalty = 0.0 if self.penalty is None else self.penalty
        if not is_number(penalty) or not -math.inf < penalty <= 0:
            raise ValueError(f"penalty must be finite and at most 0, got {self.penalty!r}")
        if self.penalty_rule not in get_args(PenaltyRule):
            raise ValueError(
                f"penalty_rule must be one of {get_args(PenaltyRule)}, got {self.penalty_rule!r}"
            )

    @property
    def start(self) -> int:
        """Column S of the start, which is also its distance from the oracle: 0 or 1."""
        return int(self.active)

    @property
    def junction(self) -> int:
        """Column of the junction."""
        return self.start + self.corridor_length

    @property
    def horizon(self) -> int:
        """Number of steps T of every episode."""
        return self.corridor_length + 2 * self.start + 1

    @cached_property
    def step_penalty(self) -> float:
        """Reward of an idle step."""
        return -1.0 / (self.horizon - 1) if self.penalty is None else float(self.penalty)

    @cached_property
    def columns(self) -> NDArray[np.int64]:
        """Column of each cell, (cells,): the corridor from west to east, the upper arm, the lower arm."""
        return np.append(np.arange(self.junction + 1), [self.junction, self.junction])

    @cached_property
    def arms(self) -> NDArray[np.int64]:
        """Arm of each cell, (cells,): 1 the upper, -1 the lower, 0 none."""
        return np.append(np.zeros(self.junction + 1, dtype=np.int64), [1, -1])

    @cached_property
    def moves(self) -> NDArray[np.int64]:
        """Next cell for each cell and action, (cells, 4); a move into a wall has no effect."""
        junction, upper, lower = self.junction, self.junction + 1, self.junction + 2
        moves = np.tile(np.arange(lower + 1)[:, None], (1, 4))
        moves[:junction, RIGHT] += 1
        moves[1 : junction + 1, LEFT] -= 1
        moves[junction, [UP, DOWN]] = upper, lower
        moves[upper, DOWN] = moves[lower, UP] = junction
        return moves

    @cached_property
    def cell_observations(self) -> NDArray[np.float32]:
        """Observation in each cell without the hint, (cells, 2): [at the junction or in an arm, arm]."""
        return np.stack([self.columns == self.junction, self.arms], axis=1).astype(np.float32)

    def idle(self, columns: Any, before: Any, after: Any, time: int, hint_due: Any) -> Any:
        """Return whether a step is penalized, for one environment, or N in arrays or tensors (N,).

        Args:
            columns: `columns`, as an array or tensor.
            before: cells before the step.
            after: cells after the step.
            time: number of steps of the episode, including this step.
            hint_due: whether the hint was not yet shown before the step; of NumPy's or torch's bool type.
        """
        if self.penalty_rule == "schedule":
            return columns[after] < time - self.start
        fetches_hint = hint_due & (after == 0)
        return (columns[after] <= columns[before]) & ~fetches_hint


PIXELS = 8
"""Width and height of a cell in an image."""
WALL, FLOOR, ORACLE, GOAL, AGENT = range(5)
"""Contents of a cell, as indices of `SYMBOLS` and `COLORS`."""
SYMBOLS = np.array(list(" .OGA"))
COLORS = np.array(
    [(40, 40, 40), (230, 230, 230), (90, 140, 220), (90, 180, 90), (220, 80, 60)], dtype=np.uint8
)


def render_maze(rules: TMazeRules, mode: str, cell: int, goal: int) -> str | NDArray[np.uint8]:
    """Render the maze with the agent in a cell and the goal in an arm, in a render mode of `TMaze`.

    Returns:
        For "ansi", three lines of L + S + 1 characters: O oracle, G goal, A agent, ``.`` floor, space wall.
        For "rgb_array", an RGB image, uint8 (3 * 8, (L + S + 1) * 8, 3).
    """
    grid = np.full((3, rules.junction + 1), WALL)
    grid[1], grid[[0, 2], -1] = FLOOR, FLOOR
    grid[1, 0], grid[1 - goal, -1] = ORACLE, GOAL
    grid[1 - rules.arms[cell], rules.columns[cell]] = AGENT
    if mode == "ansi":
        return "\n".join("".join(row) for row in SYMBOLS[grid])
    return COLORS[grid].repeat(PIXELS, axis=0).repeat(PIXELS, axis=1)


@lru_cache(maxsize=16)
def shared_rules(rules: TMazeRules) -> TMazeRules:
    """Return the first of equal rules, so that all copies of an environment have the same tables."""
    return rules


class TMaze(gymnasium.Env[NDArray[np.float32], np.int64]):
    """T-Maze of Ni et al. 2023 (arXiv:2307.03864); `TMazeRules` describes the map and the rewards.

    Observation, float32 (2,): ``[1 at the junction and in its arms else 0, hint]``. The second entry is the
    arm of the goal (1 up, -1 down) at the first visit of the oracle, the arm of the agent if it is in an
    arm, else 0. All corridor cells have the same observation.

    Actions: 0 right (east), 1 up, 2 left, 3 down. A move into a wall has no effect.

    Every episode lasts T steps (L + 1 passive, L + 3 active, with L = corridor_length) and is then
    terminated. The horizon is part of the task, so no episode is truncated. ``info["is_success"]`` is in the
    info of every step; it is True only in the last step, if the agent is in the arm of the goal.

    Args:
        corridor_length: L, steps from the start to the junction; at least 1.
        active: if False, the agent starts on the oracle; if True, one step east of it.
        penalty: reward of each idle step, at most 0; None means -1 / (T - 1).
        penalty_rule: "schedule" (the paper's) penalizes each step after which the agent lags behind the
            shortest path. "step" penalizes each step that leads neither east nor to the hint.
        render_mode: None, "ansi" (text) or "rgb_array" (uint8 (H, W, 3)).

    Raises:
        ValueError: if an argument is invalid, or an action is not in 0..3.
        gymnasium.error.ResetNeeded: from `step`, before the first reset or after the end of an episode.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 10}  # noqa: RUF012 - as in Gymnasium

    def __init__(
        self,
        corridor_length: int = 50,
        active: bool = False,
        penalty: float | None = None,
        penalty_rule: PenaltyRule = "schedule",
        render_mode: str | None = None,
    ):
        check_render_mode(render_mode)
        self.rules = shared_rules(TMazeRules(corridor_length, active, penalty, penalty_rule))
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(4)
        self._cell = self.rules.start
        self._goal = 1
        self._hint_shown = False
        self._time = self.rules.horizon

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Draw the arm of the goal and put the agent at the start; ``options`` are ignored."""
        super().reset(seed=seed)
        self._goal = draw_goal(self.np_random)
        self._cell = self.rules.start
        self._time = 0
        self._hint_shown = False
        return self._observe(), {}

    def step(self, action: np.int64 | int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Move the agent; for rewards see `TMazeRules`."""
        if self._time >= self.rules.horizon:
            raise ResetNeeded("there is no running episode: call reset() before step()")
        if not self.action_space.contains(action):
            raise ValueError(f"action must be 0 (right), 1 (up), 2 (left) or 3 (down), got {action!r}")
        self._time += 1
        before, self._cell = self._cell, int(self.rules.moves[self._cell, action])
        terminated = self._time == self.rules.horizon
        success = terminated and bool(self.rules.arms[self._cell] == self._goal)
        hint_due = np.bool_(not self._hint_shown)
        idle = self.rules.idle(self.rules.columns, before, self._cell, self._time, hint_due)
        reward = float(success) if terminated else self.rules.step_penalty if idle else 0.0
        return self._observe(), reward, terminated, False, {"is_success": success}

    def render(self) -> str | NDArray[np.uint8] | None:
        """Render the maze with agent and goal according to ``render_mode``."""
        if self.render_mode is None:
            gymnasium.logger.warn("render() does nothing without render_mode='ansi' or 'rgb_array'")
            return None
        return render_maze(self.rules, self.render_mode, self._cell, self._goal)

    def _observe(self) -> NDArray[np.float32]:
        observation = self.rules.cell_observations[self._cell].copy()
        if self._cell == 0 and not self._hint_shown:
            observation[1] = self._goal
            self._hint_shown = True
        return observation


def draw_goal(generator: np.random.Generator) -> int:
    """Draw the arm of the goal, 1 or -1 with equal probability."""
    return 2 * int(generator.integers(2)) - 1


def check_render_mode(render_mode: str | None) -> None:
    """Raise ValueError unless render_mode is None or a render mode of `TMaze`."""
    allowed = TMaze.metadata["render_modes"]
    if render_mode not in (None, *allowed):
        raise ValueError(f"render_mode must be None or one of {', '.join(allowed)}; got {render_mode!r}")
