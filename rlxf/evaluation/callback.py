"""Callback that evaluates an agent every so many steps."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv, sync_envs_normalization, unwrap_vec_normalize

from rlxf.evaluation.environment import EnvLike, preserve_rng_state
from rlxf.evaluation.episodes import evaluate
from rlxf.evaluation.report import Report
from rlxf.evaluation.sweep import TargetSweep


class PeriodicCallback(BaseCallback):
    """Callback that calls `act` every ``every_steps`` training steps, counted from step 0 of the agent.

    Args:
        every_steps: interval between calls, in environment steps over all environments.

    Raises:
        ValueError: if every_steps is less than 1.
    """

    def __init__(self, every_steps: int):
        if every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, got {every_steps}")
        super().__init__()
        self.every_steps = every_steps
        self._due = every_steps

    def _on_training_start(self) -> None:
        self._due = self._next_due()

    def _on_step(self) -> bool:
        if self.num_timesteps >= self._due:
            self._due = self._next_due()
            self.act()
        return True

    def _next_due(self) -> int:
        return (self.num_timesteps // self.every_steps + 1) * self.every_steps

    @abstractmethod
    def act(self) -> None:
        """Perform the action of the callback."""


SEED = 500_000
"""Default seed. It differs from that of `evaluate`, so the best checkpoint is scored on other episodes."""


class EvaluationCallback(PeriodicCallback):
    """Evaluate the agent at regular intervals and log the ``eval/*`` tags of `Report.scalars`.

    All evaluations use the same seed and thus the same episodes, so they differ only by the agent.
    Observations are normalized as in training; a ``VecNormalize`` around ``env`` gets its statistics.
    Evaluations do not affect the training: the states of the global random generators are restored.

    The maximum of many evaluations is biased upwards. Evaluate the agent in ``best_path`` on other episodes,
    for example with `evaluate`, and report it in addition to the last checkpoint, not instead of it.

    Args:
        env: a Gymnasium id, an ``Env``, a ``VectorEnv`` or a ``VecEnv``; not the training environment.
        episodes: episodes of an evaluation, for each target.
        every_steps: interval between evaluations, in environment steps over all environments; in updates for
            an agent that learns offline.
        target_returns: target returns, see `evaluate`. The first one determines the best agent.
        deterministic: use the most likely action instead of a sample.
        n_envs: number of environments to create if ``env`` is an id.
        seed: seed of the environments.
        best_path: path at which the agent is saved after each new highest mean return; None to save nothing.
        on_new_best: function without arguments, called before each such save, e.g. to save related files.

    Attributes:
        reports: `Report` of each evaluation, of the first target, by the number of steps before it.
        last: report of the last evaluation; a `TargetSweep` with ``target_returns``. None before the first.
        best: highest mean return so far; None before the first evaluation.
        best_step: number of steps before the best evaluation; None before the first.

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
        """Evaluate and log; save the agent if it is the best so far."""
        if isinstance(self.env, VecEnv) and unwrap_vec_normalize(self.env) is not None:
            sync_envs_normalization(self.training_env, self.env)
        with preserve_rng_state():
            self.last = self._evaluate()
        report = self.last.first if isinstance(self.last, TargetSweep) else self.last
        self.reports[self.num_timesteps] = report
        if self.best is None or report.mean > self.best:
            self._save_best(report.mean)

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
        """Return the best mean return and its step, as JSON, for a resumed training."""
        return {"best": self.best, "best_step": self.best_step}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a `state`; earlier reports are not restored."""
        self.best, self.best_step = state["best"], state["best_step"]

    def _save_best(self, mean: float) -> None:
        self.best, self.best_step = mean, self.num_timesteps
        if self.on_new_best is not None:
            self.on_new_best()
        if self.best_path is not None:
            self.model.save(self.best_path)
