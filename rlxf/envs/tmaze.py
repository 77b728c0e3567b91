"""T-Maze: a hint at the start, a long corridor, and a decision at its end."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from rlxf.envs.tmaze_picture import as_pixels, as_text
from rlxf.envs.tmaze_rules import PenaltyRule, TMazeRules


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
        penalty_rule: "schedule" (the paper's) penalises each step after which the agent lags the shortest
            path. "step" penalises each step that leads neither east nor to the hint.
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
        check_render_mode(render_mode, self.metadata["render_modes"])
        self.rules = TMazeRules(corridor_length, active, penalty, penalty_rule)
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
        self._cell, self._time, self._hint_shown = self.rules.start, 0, False
        return self._observe(), {}

    def step(self, action: np.int64 | int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Move the agent; the class docstring describes observations and rewards."""
        if self._time >= self.rules.horizon:
            raise ResetNeeded("there is no running episode: call reset() before step()")
        if not self.action_space.contains(action):
            raise ValueError(f"action must be 0 (right), 1 (up), 2 (left) or 3 (down), got {action!r}")
        self._time += 1
        before, self._cell = self._cell, int(self.rules.moves[self._cell, action])
        terminated = self._time == self.rules.horizon
        success = terminated and bool(self.rules.arms[self._cell] == self._goal)
        reward = float(success) if terminated else self._penalty(before)
        return self._observe(), reward, terminated, False, {"is_success": success}

    def render(self) -> str | NDArray[np.uint8] | None:
        """Render the maze with agent and goal according to ``render_mode``."""
        if self.render_mode is None:
            gymnasium.logger.warn("render() does nothing without render_mode='ansi' or 'rgb_array'")
            return None
        draw = as_text if self.render_mode == "ansi" else as_pixels
        return draw(self.rules, self._cell, self._goal)

    def _penalty(self, before: int) -> float:
        idle = self.rules.idle(before, self._cell, self._time, not self._hint_shown)
        return self.rules.step_penalty if idle else 0.0

    def _observe(self) -> NDArray[np.float32]:
        observation = self.rules.sights[self._cell].copy()
        if self._cell == 0 and not self._hint_shown:
            observation[1] = self._goal
            self._hint_shown = True
        return observation


def draw_goal(generator: np.random.Generator) -> int:
    """Draw the arm of the goal, 1 or -1 with equal probability."""
    return 2 * int(generator.integers(2)) - 1


def check_render_mode(render_mode: str | None, allowed: list[str]) -> None:
    """Raise ValueError unless render_mode is None or one of ``allowed``."""
    if render_mode not in (None, *allowed):
        raise ValueError(f"render_mode must be None or one of {', '.join(allowed)}; got {render_mode!r}")
