"""Base classes of callbacks that act at regular intervals of steps, and of those that select an agent."""

import math
import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import (
    CSVOutputFormat,
    Figure,
    HumanOutputFormat,
    JSONOutputFormat,
    Video,
)

from rlxf.evaluation.rollout import uncompiled_steps
from rlxf.utils.checks import MAX_INT64, as_whole_number, check_bool, check_int, check_not_negative

TEXT_OUTPUTS = (HumanOutputFormat, JSONOutputFormat, CSVOutputFormat)
"""SB3's output formats for text. They write an empty row if a picture is excluded."""


class PeriodicCallback(BaseCallback):
    """Callback that calls `on_interval` every ``every_steps`` training steps, from step 0 of the agent.

    The training waits for the calls. With a ``budget``, a call is left out if the environment steps of all
    calls would then exceed this multiple of the training steps so far. This rule uses no clock, so equal
    training runs make equal calls.

    Args:
        every_steps: interval between calls, in environment steps over all environments; in updates for an
            agent that learns offline.
        budget: largest number of environment steps of all calls for each training step; None or ``math.inf``
            for no limit.

    Attributes:
        played: number of environment steps of all calls.
        seconds: wall-clock time of all calls since the training was started or resumed.
        on_env_step: function that is called before each environment step of a call, or None. An exception
            that it raises ends the call and the training, e.g. after Ctrl-C.

    Raises:
        TypeError: if every_steps or budget is not a number.
        ValueError: if every_steps is less than 1 or has a fraction, or budget is negative or NaN.
    """

    def __init__(self, every_steps: int, budget: float | None = None):
        every_steps = as_whole_number("every_steps", every_steps)
        if budget is not None and budget != math.inf:
            check_not_negative("budget", budget)
        super().__init__()
        self.every_steps, self.budget = every_steps, budget
        self.played, self.seconds = 0, 0.0
        self.on_env_step: Callable[[], object] | None = None
        self._due = every_steps
        self._has_ended = False

    def is_due(self, step: int) -> bool:
        """Return whether a call is due after ``step`` training steps; the budget may still forbid it."""
        return step >= self._due

    def _on_training_start(self) -> None:
        self._due = self._next_due()
        self.seconds = 0.0
        if self.num_timesteps == 0:  # of a new training, also if the callback had another one before
            self.reset()

    def reset(self) -> None:
        """Discard what belongs to an earlier training."""
        self.played, self._has_ended = 0, False

    def _on_step(self) -> bool:
        dones = self.locals.get("dones")
        self._has_ended = self._has_ended or dones is None or bool(dones.any())
        if self.is_due(self.num_timesteps):
            self._due = self._next_due()
            if self._allowed():
                start = time.monotonic()
                with uncompiled_steps(self.model):
                    self.played += self.on_interval()
                self.seconds += time.monotonic() - start
        return True

    def _next_due(self) -> int:
        return (self.num_timesteps // self.every_steps + 1) * self.every_steps

    def _allowed(self) -> bool:
        return self.budget is None or self.played + self.expected_steps() <= self.budget * self.num_timesteps

    @property
    def _training_length(self) -> float:
        """Mean length of the last training episodes.

        Until one has ended, it is the number of steps so far of each environment, a lower bound. It is 0 if
        SB3's ``Monitor`` reports none of those that have ended.
        """
        lengths = [episode["l"] for episode in self.model.ep_info_buffer or ()]
        if lengths:
            return float(np.mean(lengths))
        env = self.model.get_env()
        if env is None or self._has_ended:
            return 0.0
        n_envs: int = getattr(self.model, "n_envs_total", env.num_envs)
        return self.num_timesteps / n_envs

    def write_picture(self, tag: str, value: Figure | Video, exclude: tuple[str, ...] = ()) -> None:
        """Write a picture now, with the present step, where the logger does not write text.

        Recorded values, in contrast, get the step of the next row of the log.

        Args:
            tag: name of the picture.
            value: the picture.
            exclude: formats that are left out in addition to those for text, such as "tensorboard".
        """
        for output in self.logger.output_formats:
            if not isinstance(output, TEXT_OUTPUTS):
                output.write({tag: value}, {tag: ("csv", *exclude)}, self.num_timesteps)

    @abstractmethod
    def on_interval(self) -> int:
        """Act, and return the number of environment steps that this took."""

    @abstractmethod
    def expected_steps(self) -> float:
        """Return the expected number of environment steps of the next call."""

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed training needs, as JSON."""
        return {"played": self.played, "has_ended": self._has_ended}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a `state`.

        Raises:
            KeyError, TypeError, ValueError: if a value is missing or not allowed.
        """
        played, has_ended = state["played"], state.get("has_ended", False)
        check_int("played", played, 0, MAX_INT64)
        check_bool("has_ended", has_ended)
        self.played, self._has_ended = played, has_ended


class SelectingCallback(PeriodicCallback):
    """Callback that passes a value to `select` at each interval, which saves the agent with the best one.

    Args:
        every_steps: see `PeriodicCallback`.
        mode: whether the best value is the lowest ("min") or the highest ("max").
        best_path: path at which the agent is saved after each new best value; None to save nothing.
        on_new_best: function without arguments, called before each such save, e.g. to save related files.
        budget: see `PeriodicCallback`.

    Attributes:
        best: best finite value so far, in all trainings; None before the first one.
        best_step: number of steps before it, in the training that had it; None before the first one.
    """

    def __init__(
        self,
        every_steps: int,
        mode: Literal["min", "max"],
        best_path: str | Path | None = None,
        on_new_best: Callable[[], object] | None = None,
        budget: float | None = None,
    ):
        super().__init__(every_steps, budget)
        self.mode, self.best_path, self.on_new_best = mode, best_path, on_new_best
        self.best: float | None = None
        self.best_step: int | None = None

    def select(self, value: float) -> None:
        """Save the agent if the value is finite and better than all before."""
        if not math.isfinite(value) or not self._is_better(value):
            return
        self.best, self.best_step = value, self.num_timesteps
        if self.on_new_best is not None:
            self.on_new_best()
        if self.best_path is not None:
            self.model.save(self.best_path)

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return True
        return value < self.best if self.mode == "min" else value > self.best

    def state(self) -> dict[str, Any]:
        """Return the best value and its step as JSON, in addition to the state of `PeriodicCallback`."""
        return super().state() | {"best": self.best, "best_step": self.best_step}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a `state`; results of earlier intervals are not restored."""
        super().load_state(state)
        best, best_step = state["best"], state["best_step"]
        if best is not None:
            best = float(best)
            check_int("best_step", best_step, 0, MAX_INT64)
        self.best, self.best_step = best, best_step
