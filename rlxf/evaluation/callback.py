"""Evaluation while an agent learns."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stable_baselines3.common.vec_env import VecEnv, sync_envs_normalization, unwrap_vec_normalize

from rlxf.evaluation.environment import EnvLike
from rlxf.evaluation.episodes import evaluate
from rlxf.evaluation.every_steps import EverySteps
from rlxf.evaluation.isolation import generators_kept
from rlxf.evaluation.report import Report
from rlxf.evaluation.sweep import TargetSweep

SEED = 500_000
"""Not that of `evaluate`: a checkpoint that was the best in some episodes is judged by others."""


class EvaluationCallback(EverySteps):
    """Evaluate the agent every so many steps and log the ``eval/*`` tags of `Report.scalars`.

    Every evaluation plays the same episodes (same seed), so that their difference is the agent's.
    Observations are normalised as in training; a ``VecNormalize`` around ``env`` gets its statistics.
    An evaluation changes no bit of the training: the states of the global generators are restored.

    The highest of many evaluations is high by luck, too. So what is kept in ``best_path`` has to be judged by
    other episodes, which those of `evaluate` are, and reported beside the last checkpoint, not in its place.

    Args:
        env: a Gymnasium id, an ``Env``, a ``VectorEnv`` or a ``VecEnv``; not the one trained in.
        episodes: episodes of an evaluation, for each target.
        every_steps: steps of training from one evaluation to the next: of environments, over all of them;
            for an agent that learns from data updates.
        target_returns: returns to ask for, see `evaluate`. The first one counts for what is best.
        deterministic: the most likely action instead of a sample.
        n_envs: environments to make when ``env`` is an id.
        seed: of the environments.
        best_path: where the agent is saved each time its mean return is higher than ever before; None for
            nowhere.
        on_new_best: called without arguments before the agent is saved so, e.g. to save what belongs to it.

    Attributes:
        reports: the `Report` of each evaluation, of the first target, by the number of steps before it.
        last: report of the last evaluation; a `TargetSweep` with ``target_returns``. None before the first.
        best: the highest mean return so far; None before the first evaluation.
        best_step: the number of steps before the best evaluation; None before the first.

    Raises:
        ValueError: if episodes or every_steps is less than 1.
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
        seed: int | None = SEED,
        best_path: str | Path | None = None,
        on_new_best: Callable[[], object] | None = None,
    ):
        super().__init__(every_steps)
        if episodes < 1:
            raise ValueError(f"episodes must be at least 1, got {episodes}")
        self.env = env
        self.episodes = episodes
        self.deterministic = deterministic
        self.n_envs = n_envs
        self.seed = seed
        self.target_returns = target_returns
        self.best_path, self.on_new_best = best_path, on_new_best
        self.reports: dict[int, Report] = {}
        self.last: Report | TargetSweep | None = None
        self.best: float | None = None
        self.best_step: int | None = None

    def act(self) -> None:
        """Evaluate and log; keep the agent if it is the best so far."""
        if isinstance(self.env, VecEnv) and unwrap_vec_normalize(self.env) is not None:
            sync_envs_normalization(self.training_env, self.env)
        with generators_kept():
            self.last = self._evaluate()
        report = self.last.first if isinstance(self.last, TargetSweep) else self.last
        self.reports[self.num_timesteps] = report
        if self.best is None or report.mean > self.best:
            self._keep(report.mean)

    def _evaluate(self) -> Report | TargetSweep:
        return evaluate(
            self.model,
            self.env,
            self.episodes,
            target_returns=self.target_returns,
            deterministic=self.deterministic,
            n_envs=self.n_envs,
            seed=self.seed,
            logger=self.logger,
        )

    def state(self) -> dict[str, Any]:
        """What it has seen, as JSON, for a training that is resumed: the best mean return, and when."""
        return {"best": self.best, "best_step": self.best_step}

    def take_up(self, state: dict[str, Any]) -> None:
        """Continue after `state`; the reports before it are not kept."""
        self.best, self.best_step = state["best"], state["best_step"]

    def _keep(self, mean: float) -> None:
        self.best, self.best_step = mean, self.num_timesteps
        if self.on_new_best is not None:
            self.on_new_best()
        if self.best_path is not None:
            self.model.save(self.best_path)
