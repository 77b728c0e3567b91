"""Base class of the commands that train an agent that acts: evaluations during training and at the end."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from shlex import quote
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv
from torch.utils.tensorboard import SummaryWriter

from rlxf.cli.options import check_counts, check_options_not_negative, check_stop_return
from rlxf.cli.output import print_out
from rlxf.cli.reports import (
    CHECKPOINT_EVALUATIONS,
    checkpoints_of,
    evaluate_checkpoints,
    plot_targets,
    print_reports,
    save_reports,
    track_reports,
)
from rlxf.cli.runs import load_agent
from rlxf.cli.training_command import TrainingCommand
from rlxf.cli.training_session import EVALUATION_STATE, save_statistics
from rlxf.evaluation import EvaluationCallback
from rlxf.training import RunFolder
from rlxf.training.distributed import process_group
from rlxf.training.tensorboard import evaluation_events
from rlxf.utils.rng import preserve_rng_state

DEFAULT_EVALUATIONS = 10
"""Default largest number of evaluations in a training."""
BEST_TITLE = "best evaluation during training: mean return"
MAX_ENVIRONMENTS = 32
"""Maximum number of parallel environments of an evaluation."""


def default_interval(total: int, least: int = 1) -> int:
    """Return the default number of steps or updates between two evaluations: a tenth of the training.

    Args:
        total: steps or updates of the training.
        least: minimum, e.g. the steps of a rollout: weights do not change in between.
    """
    return max(-(-total // DEFAULT_EVALUATIONS), least)


def chosen_interval(every: int | None, total: int, least: int = 1) -> int:
    """Return the value of an option ``--evaluate-every``, or `default_interval` if it is None."""
    return default_interval(total, least) if every is None else every


class EvaluatedTrainingCommand(TrainingCommand):
    """Training of an agent that acts: it is evaluated during the training and at the end."""

    episodes: int
    evaluate_every: int | None
    evaluation_episodes: int
    stop_return: float | None
    evaluation_budget: float
    """Default largest number of environment steps of evaluations for each step or update of the training."""

    @abstractmethod
    def make_env(self, agent: Any, episodes: int) -> VecEnv:
        """Make environments for an evaluation, with raw observations.

        Args:
            agent: agent of the training.
            episodes: number of episodes, which bounds the number of environments.
        """

    def evaluation_interval(self, agent: Any) -> int:
        """Return the number of steps or updates between two evaluations; 0 for no evaluation."""
        return chosen_interval(self.evaluate_every, self.total, self.steps_per_rollout(agent))

    def evaluation_options(self, agent: Any) -> dict[str, Any]:
        """Return further arguments of `evaluate`."""
        return {}

    def callback_options(self, agent: Any) -> dict[str, Any]:
        """Return further arguments of `EvaluationCallback`."""
        return self.evaluation_options(agent)

    def check(self) -> None:
        """Raise ValueError or TypeError if an option is invalid."""
        check_counts(self, "evaluation_episodes")
        check_options_not_negative(self, "evaluate_every")
        if self.stop_return is not None:
            process_group().check_single_process("--stop-return")
        check_stop_return(self.stop_return, self.evaluate_every, self.episodes)
        super().check()

    def describe_completion(self, run: RunFolder) -> str:
        """Return the message for a complete run, with the command to evaluate it."""
        message = super().describe_completion(run)
        return message and f"{message}; evaluate it with: rlxf evaluate {quote(str(run.path))}"

    @contextmanager
    def callbacks(self, agent: Any, run: RunFolder) -> Iterator[list[BaseCallback]]:
        """Context manager for the callbacks of the training; the first one evaluates."""
        every = self.evaluation_interval(agent)
        episodes = self.evaluation_episodes
        if not every:
            yield []
            return
        with self.fresh_env(agent, episodes) as env:
            yield [
                EvaluationCallback(
                    env,
                    episodes,
                    every,
                    best_path=run.best,
                    on_new_best=partial(save_statistics, agent, run.best_normalizer),
                    budget=self.evaluation_budget if self.evaluate_every is None else None,
                    stop_return=self.stop_return,
                    **self.callback_options(agent),
                )
            ]

    def finish(self, agent: Any, run: RunFolder) -> None:
        """Evaluate and report the last checkpoint, and those that the training selected."""
        selected = {name: path for name, path in checkpoints_of(run).items() if name != "last"}
        folders = {name: run.path / CHECKPOINT_EVALUATIONS[name][0] for name in selected}
        options = {"episodes": self.episodes, **self.evaluation_options(agent)}
        with self.fresh_env(agent, self.episodes) as env:
            agents = {"last": agent} | {
                name: load_agent(run, env, path, self.learner.device) for name, path in selected.items()
            }
            reports = evaluate_checkpoints(
                run,
                agents,
                partial(self._final_logger, agent, run),
                self.verbose,
                env=env,
                **options,
            )
        save_reports(run, reports)
        track_reports(agent.logger, reports, agent.num_timesteps)
        print_reports(run, agents, reports)
        if agent.num_timesteps < self.total:
            print_out(
                f"an evaluation reached --stop-return {self.stop_return:g}: the training ended after "
                f"{agent.num_timesteps:,} of {self.total:,} {self.unit}"
            )
        elif summary := self.describe_selection(run, EVALUATION_STATE, run.best, BEST_TITLE):
            print_out(summary)
        plot_targets(reports, {"last": run.path, **folders})
        self.compare_reports(agent, run, reports)

    def _final_logger(
        self, agent: Any, run: RunFolder, name: str
    ) -> AbstractContextManager[Logger | SummaryWriter]:
        """Return the log of the final evaluation of a checkpoint."""
        if name == "last":
            return nullcontext(agent.logger)
        return evaluation_events(run.path, CHECKPOINT_EVALUATIONS[name][0])

    def compare_reports(self, agent: Any, run: RunFolder, reports: Mapping[str, Any]) -> None:  # optional
        """Print comparisons with the reports of the final evaluation, by checkpoint name."""

    @contextmanager
    def fresh_env(self, agent: Any, episodes: int) -> Iterator[VecEnv]:
        """Yield environments for an evaluation, and close them afterwards."""
        with preserve_rng_state():  # without a seed, SB3 draws from NumPy's global generator
            env = self.make_env(agent, episodes)
        with closing(env):
            yield env
