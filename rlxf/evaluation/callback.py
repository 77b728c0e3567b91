"""Callback that evaluates the agent at regular intervals of steps."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize

from rlxf.envs.make import EnvLike, check_is_env
from rlxf.envs.specs import find_spec
from rlxf.evaluation.environment import check_not_trained_in, copy_statistics
from rlxf.evaluation.episodes import (
    check_return_conditioned,
    check_target_is_given,
    evaluate,
    validate_targets,
)
from rlxf.evaluation.periodic import SelectingCallback
from rlxf.evaluation.report import Report, TargetSweep
from rlxf.utils.checks import check_int, check_seed
from rlxf.utils.rng import preserve_rng_state

DEFAULT_CALLBACK_SEED = 500_000
"""Default seed. It differs from that of `evaluate`, so the best checkpoint is scored on other episodes."""


class EvaluationCallback(SelectingCallback):
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
        TypeError: if a number has another type, ``env`` is not an environment or an id, or before training
            starts, if an agent that is conditioned on a return gets no target.
        ValueError: if the id is unknown, a number is out of range, or a target is not finite or a duplicate;
            before training starts, if the agent trains in ``env``, or ``target_returns`` is passed for an
            agent that is not conditioned on a return.
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
        super().__init__(every_steps, "max", best_path, on_new_best, budget)
        check_is_env(env)
        if isinstance(env, str):
            find_spec(env)
        check_int("episodes", episodes)
        check_int("n_envs", n_envs)
        if seed is not None:
            check_seed("seed", seed)
        if stop_return is not None and math.isnan(stop_return):
            raise ValueError("stop_return must be a number or None, got nan")
        self.env = env
        self.episodes = episodes
        self.target_returns = None if target_returns is None else validate_targets(target_returns, None)
        self.deterministic = deterministic
        self.n_envs = n_envs
        self.seed = seed
        self.stop_return, self.episode_length = stop_return, episode_length
        self.reports: dict[int, Report] = {}
        self.last: Report | TargetSweep | None = None

    def _on_training_start(self) -> None:
        super()._on_training_start()
        check_not_trained_in(self.model, self.env, "EvaluationCallback", "make_vec_env(id, n_envs) or an id")
        if self.target_returns is None:
            check_target_is_given(self.model, self.env)
        else:
            check_return_conditioned(self.model)

    def reset(self) -> None:
        """Discard the reports and the cost of an earlier training."""
        super().reset()
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
        self.select(report.mean)
        lengths = np.concatenate([each.lengths for each in reports])
        self.episode_length = float(lengths.mean())
        return int(lengths.sum())

    def state(self) -> dict[str, Any]:
        """Return the best mean return and its step, and the cost so far, as JSON, for a resumed training."""
        return super().state() | {"episode_length": self.episode_length}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a `state`; earlier reports are not restored."""
        super().load_state(state)
        self.episode_length = float(state["episode_length"])
