"""Callbacks that act at regular intervals of steps, and the one that evaluates the agent."""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import (
    CSVOutputFormat,
    Figure,
    HumanOutputFormat,
    JSONOutputFormat,
    Video,
)
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize

from rlxf.envs.make import EnvLike
from rlxf.evaluation.environment import copy_statistics
from rlxf.evaluation.episodes import evaluate
from rlxf.evaluation.report import Report, TargetSweep
from rlxf.evaluation.rollout import uncompiled_steps
from rlxf.utils.checks import check_int
from rlxf.utils.rng import preserve_rng_state

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
        budget: largest number of environment steps of all calls for each training step; None for no limit.

    Attributes:
        played: number of environment steps of all calls.
        seconds: wall-clock time of all calls since the training was started or resumed.
        on_env_step: function that is called before each environment step of a call, or None. An exception
            that it raises ends the call and the training, e.g. after Ctrl-C.

    Raises:
        ValueError: if every_steps is less than 1.
    """

    def __init__(self, every_steps: int, budget: float | None = None):
        if every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, got {every_steps}")
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
        """Load a `state`."""
        self.played = state["played"]
        self._has_ended = state.get("has_ended", False)


DEFAULT_CALLBACK_SEED = 500_000
"""Default seed. It differs from that of `evaluate`, so the best checkpoint is scored on other episodes."""


class EvaluationCallback(PeriodicCallback):
    """Evaluate the agent at regular intervals and log the ``eval/*`` tags of `Report.scalars`.

    With a ``seed``, all evaluations use the same episodes, so they differ only by the agent.
    Observations are normalized as in training; a ``VecNormalize`` around ``env`` gets its statistics.
    Evaluations do not affect the training: the states of the global random generators are restored.
    With a ``budget`` or a ``stop_return``, the agent is not evaluated before its first update. With a
    ``budget``, it is also evaluated at the last step, whatever the budget, because the best of few early
    evaluations may be far worse than the trained agent. A training of a single rollout has no evaluation,
    because its only update follows its last step.

    The maximum of many evaluations is biased upwards. Evaluate the agent in ``best_path`` on other episodes,
    for example with `evaluate`, and report it in addition to the last checkpoint, not instead of it. If the
    callback is used for several trainings, the best agent is that of all of them, as for SB3's
    ``EvalCallback``; the budget is that of each.

    Args:
        env: a Gymnasium id, an ``Env``, a ``VectorEnv`` or a ``VecEnv``; not the training environment.
        episodes: episodes of an evaluation, for each target.
        every_steps: interval between evaluations, in environment steps over all environments; in updates for
            an agent that learns offline.
        target_returns: target returns, see `evaluate`. The first one determines the best agent.
        deterministic: use the most likely action instead of a sample.
        n_envs: number of environments to create if ``env`` is an id.
        seed: seed of the environments; None does not seed them.
        best_path: path at which the agent is saved after each new highest mean return; None to save nothing.
        on_new_best: function without arguments, called before each such save, e.g. to save related files.
        budget: see `PeriodicCallback`; None for an evaluation at every interval.
        stop_return: mean return of an evaluation, of the first target, at which the training ends; None to
            train to the end. The weights are then those of this evaluation, and of the best agent. The mean
            is that of few episodes, so report an evaluation on other episodes, for example with `evaluate`.
        episode_length: expected number of steps of an episode before the first evaluation, for an agent that
            has no training episodes.

    Attributes:
        reports: `Report` of each evaluation, of the first target, by the number of steps before it. Those of
            an earlier training are removed when a new one begins.
        last: report of the last evaluation; a `TargetSweep` with ``target_returns``. None before the first.
        best: highest mean return so far; None before the first evaluation.
        best_step: number of steps before the best evaluation, in the training that had it; None before the
            first.

    Raises:
        TypeError: if episodes is not an int.
        ValueError: if episodes or every_steps is less than 1, or stop_return is NaN.
    """

    def __init__(
        self,
        env: EnvLike,
        episodes: int = 100,
        every_steps: int = 10_000,
        *,
        target_returns: Sequence[float] | None = None,
        deterministic: bool = True,
        n_envs: int = 32,
        seed: int | None = DEFAULT_CALLBACK_SEED,
        best_path: str | Path | None = None,
        on_new_best: Callable[[], object] | None = None,
        budget: float | None = None,
        stop_return: float | None = None,
        episode_length: float = 0.0,
    ):
        super().__init__(every_steps, budget)
        check_int("episodes", episodes)
        if stop_return is not None and math.isnan(stop_return):
            raise ValueError("stop_return must be a number or None, got nan")
        self.env = env
        self.episodes = episodes
        self.target_returns = target_returns
        self.deterministic = deterministic
        self.n_envs = n_envs
        self.seed = seed
        self.best_path, self.on_new_best = best_path, on_new_best
        self.stop_return, self.episode_length = stop_return, episode_length
        self.reports: dict[int, Report] = {}
        self.last: Report | TargetSweep | None = None
        self.best: float | None = None
        self.best_step: int | None = None

    def _on_training_start(self) -> None:
        super()._on_training_start()
        if self.num_timesteps == 0:
            self.reports.clear()

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due after ``step`` training steps, or is the last one."""
        return super().is_due(step) or self._is_last(step)

    def _on_step(self) -> bool:
        """Evaluate if it is due; return False if this evaluation reaches `stop_return`."""
        super()._on_step()
        report = self.reports.get(self.num_timesteps)
        return self.stop_return is None or report is None or not report.mean >= self.stop_return

    def _is_last(self, step: int) -> bool:
        """Return whether this step reaches the total with a budget, which then does not apply.

        The steps after it complete the last rollout, and have the same weights.
        """
        if self.budget is None or self.model._n_updates == 0:
            return False
        total = self.model._total_timesteps
        return step >= total and all(each < total for each in self.reports)

    def _allowed(self) -> bool:
        before_updates = self.budget is None and self.stop_return is None
        updated = before_updates or self.model._n_updates > 0
        return (updated and super()._allowed()) or self._is_last(self.num_timesteps)

    def expected_steps(self) -> float:
        """Return the expected steps of an evaluation.

        The length of an episode is the longer of two means: that of the last evaluation, and that of the last
        training episodes.
        """
        length = max(self.episode_length, self._training_length)
        return self.episodes * len(self.target_returns or (None,)) * length

    def on_interval(self) -> int:
        """Evaluate and log; save the agent if it is the best so far."""
        training_env = self.model.get_env()  # None for an offline agent, which has no statistics to copy
        if isinstance(self.env, VecEnv) and unwrap_vec_normalize(self.env) and training_env is not None:
            copy_statistics(training_env, self.env)
        with preserve_rng_state():
            self.last = evaluate(
                self.model,
                self.env,
                self.episodes,
                target_returns=self.target_returns,
                deterministic=self.deterministic,
                n_envs=self.n_envs,
                seed=self.seed,
                logger=self.logger,
                on_step=self.on_env_step,
            )
        reports = list(self.last.reports.values()) if isinstance(self.last, TargetSweep) else [self.last]
        report = self.reports[self.num_timesteps] = reports[0]
        if self.best is None or report.mean > self.best:
            self._save_best(report.mean)
        lengths = np.concatenate([each.lengths for each in reports])
        self.episode_length = float(lengths.mean())
        return int(lengths.sum())

    def state(self) -> dict[str, Any]:
        """Return the best mean return and its step, and the cost so far, as JSON, for a resumed training."""
        best = {"best": self.best, "best_step": self.best_step}
        return super().state() | best | {"episode_length": self.episode_length}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a `state`; earlier reports are not restored."""
        super().load_state(state)
        self.best, self.best_step = state["best"], state["best_step"]
        self.episode_length = state["episode_length"]

    def _save_best(self, mean: float) -> None:
        self.best, self.best_step = mean, self.num_timesteps
        if self.on_new_best is not None:
            self.on_new_best()
        if self.best_path is not None:
            self.model.save(self.best_path)
