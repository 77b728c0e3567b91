"""Vectorized T-Maze, stepped with array operations."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from rlxf.envs.tmaze import PenaltyRule, TMaze, TMazeRules, check_render_mode, draw_goal, render_maze
from rlxf.utils.checks import check_int

Step = tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


class TMazeVector(VectorEnv[NDArray[np.float32], NDArray[np.int64], NDArray[Any]]):
    """N environments with the rules of `TMaze`, stepped together without a loop over environments.

    Environment i seeded with s draws the same goals as a `TMaze` reset with ``seed=s``, for any N. Every
    episode has the same length, so all N episodes end at the same step and share one step counter.

    Shapes: observations float32 (N, 2), actions int64 (N,), rewards float64 (N,), done flags bool (N,).
    With ``SAME_STEP``, the last step returns the first observation of the next episode. The last observation
    is in ``infos["final_obs"]`` (object array of (2,) arrays), with ``infos["final_info"]["is_success"]``.
    With ``NEXT_STEP``, the last step returns the last observation. The next step ignores its actions, has
    reward 0 and returns the first observation.

    Args:
        num_envs: N, at least 1.
        corridor_length, active, penalty, penalty_rule: as in `TMaze`.
        autoreset_mode: a `gymnasium.vector.AutoresetMode` or its value. The default SAME_STEP has no filler
            steps.
        render_mode: None, "ansi" or "rgb_array"; `render` returns a tuple of N images.

    Raises:
        TypeError: if N is not an int.
        ValueError: if an argument is invalid, the autoreset mode is neither SAME_STEP nor NEXT_STEP, the
            number of seeds is not N, or the actions are not N integers in 0..3.
        gymnasium.error.ResetNeeded: from `step`, before the first reset.
    """

    _xp: ClassVar[ModuleType] = np
    """Module of the array type of a class: the dynamics consist of operators and ``where``."""

    def __init__(
        self,
        num_envs: int = 1,
        corridor_length: int = 50,
        active: bool = False,
        penalty: float | None = None,
        penalty_rule: PenaltyRule = "schedule",
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        render_mode: str | None = None,
    ):
        check_int("num_envs", num_envs)
        check_render_mode(render_mode)
        self.metadata = TMaze.metadata | {"autoreset_mode": _parse_autoreset_mode(autoreset_mode)}
        self.rules = TMazeRules(corridor_length, active, penalty, penalty_rule)
        self.num_envs, self.render_mode = num_envs, render_mode
        self.single_observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.single_action_space = spaces.Discrete(4)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._generators: list[np.random.Generator] = []
        rules, array = self.rules, self._array
        self._moves, self._columns, self._arms = map(array, (rules.moves, rules.columns, rules.arms))
        self._cell_observations = array(rules.cell_observations)
        self._cells, self._goals = self._full(rules.start), self._full(1)
        self._hint_shown = self._full(False)
        self._time = rules.horizon

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start N new episodes.

        Args:
            seed: None keeps the generators; an int s seeds environment i with s + i; of N seeds, a None
                keeps the generator of that environment.
            options: ignored.
        """
        self._seed(seed)
        return self._start_episodes(), {}

    def step(self, actions: ArrayLike) -> Step:
        """Move the agent in each environment; the class docstring describes the end of an episode."""
        if not self._generators:
            raise ResetNeeded("call reset() before step()")
        if self._time == self.rules.horizon:
            return self._start_episodes(), self._full(0.0), *self._ends(False), {}
        self._time += 1
        before, self._cells = self._cells, self._moves[self._cells, self._check_actions(actions)]
        if self._time == self.rules.horizon:
            return self._last_step()
        idle = self.rules.idle(self._columns, before, self._cells, self._time, ~self._hint_shown)
        rewards = self._xp.where(idle, self.rules.step_penalty, 0.0)
        return self._observe(), rewards, *self._ends(False), self._info(self._full(False))

    def render(self) -> tuple[Any, ...] | None:
        """Render each environment according to ``render_mode``; None without a render mode."""
        if self.render_mode is None:
            return None
        pairs = zip(self._cells.tolist(), self._goals.tolist(), strict=True)
        return tuple(render_maze(self.rules, self.render_mode, cell, goal) for cell, goal in pairs)

    def state(self) -> dict[str, Any]:
        """Return positions, goals, step counter and random generators as JSON; see `StatefulVectorEnv`."""
        return {
            "time": self._time,
            "cells": self._cells.tolist(),
            "goals": self._goals.tolist(),
            "hint_shown": self._hint_shown.tolist(),
            "generators": [generator.bit_generator.state for generator in self._generators],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the dict of `state`."""
        self._time = state["time"]
        cells, goals, hint_shown = (np.array(state[name]) for name in ("cells", "goals", "hint_shown"))
        self._cells, self._goals, self._hint_shown = map(self._array, (cells, goals, hint_shown))
        self._generators = [seeding.np_random(0)[0] for _ in state["generators"]]
        for generator, generator_state in zip(self._generators, state["generators"], strict=True):
            generator.bit_generator.state = generator_state

    def _seed(self, seed: int | Sequence[int | None] | None) -> None:
        if isinstance(seed, int | np.integer):
            seed = [int(seed) + i for i in range(self.num_envs)]
        seeds = [None] * self.num_envs if seed is None else seed
        if len(seeds) != self.num_envs:
            raise ValueError(f"seed must be an int or {self.num_envs} seeds, got {len(seeds)}: {seed!r}")
        for i, new in enumerate(seeds):
            if new is not None or i >= len(self._generators):
                self._generators[i : i + 1] = [seeding.np_random(new)[0]]

    def _start_episodes(self) -> Any:
        self._time = 0
        self._cells, self._hint_shown = self._full(self.rules.start), self._full(False)
        self._goals = self._array(np.array([draw_goal(generator) for generator in self._generators]))
        return self._observe()

    def _observe(self) -> Any:
        observations = self._cell_observations[self._cells]
        hint = (self._cells == 0) & ~self._hint_shown
        observations[:, 1] = self._xp.where(hint, self._goals, observations[:, 1])
        self._hint_shown = self._hint_shown | hint
        return observations

    def _last_step(self) -> Any:
        success = self._arms[self._cells] == self._goals
        observation, info = self._observe(), self._info(success)
        if self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP:
            present = self._full(True)
            final = {"final_obs": self._final_obs(observation), "final_info": info}
            info = final | {"_final_obs": present, "_final_info": present}
            observation = self._start_episodes()
        return observation, self._xp.where(success, 1.0, 0.0), *self._ends(True), info

    def _info(self, success: Any) -> dict[str, Any]:
        return {"is_success": success, "_is_success": self._full(True)}

    def _ends(self, terminated: bool) -> tuple[Any, Any]:
        return self._full(terminated), self._full(False)

    def _array(self, values: NDArray[Any]) -> Any:
        """Return values of the rules, or of one step, in the array type of this class."""
        return values

    def _full(self, value: float) -> Any:
        """Return an array (N,) of equal values."""
        return np.full(self.num_envs, value)

    def _final_obs(self, observations: Any) -> Any:
        """Return the last observations (N, 2) of the episodes as ``infos["final_obs"]``."""
        final_obs = np.empty(self.num_envs, dtype=object)
        final_obs[:] = list(observations)
        return final_obs

    def _check_actions(self, actions: Any) -> Any:
        array = np.asarray(actions)
        is_valid = array.shape == (self.num_envs,) and array.dtype.kind in "iu"
        if not is_valid or array.min() < 0 or array.max() > 3:
            raise ValueError(f"actions must be {self.num_envs} integers from 0 to 3, got {actions!r}")
        return array


def _parse_autoreset_mode(mode: AutoresetMode | str) -> AutoresetMode:
    for allowed in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
        if mode in (allowed, allowed.value):
            return allowed
    raise ValueError(f"autoreset_mode must be SAME_STEP or NEXT_STEP, got {mode!r}")
