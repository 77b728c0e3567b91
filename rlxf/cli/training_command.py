"""Base classes of the commands that train an agent in a run folder."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv
from torch.utils.tensorboard import SummaryWriter

from rlxf.attention import TransformerSpec
from rlxf.cli.finalize_run import FOLDERS, error_context, plot_targets
from rlxf.cli.options.common import check_counts, check_from_zero
from rlxf.cli.options.env_options import check_env_trust
from rlxf.cli.output import as_table, print_out
from rlxf.cli.progress import OFFLINE, progress
from rlxf.cli.run_config import config_errors, options_from_config, options_to_config
from rlxf.cli.run_loading import load_agent, load_initial_weights, print_reports
from rlxf.cli.torchrun_job import create_run, init_distributed, rank_zero_logger, restarted_run
from rlxf.cli.training_session import Start, is_complete, learn_resumably, train_to_completion
from rlxf.evaluation import EvaluationCallback, Report, TargetSweep, evaluate
from rlxf.evaluation.environment import preserve_rng_state
from rlxf.training import RunFolder, read_archive, save_normalizer
from rlxf.training.checkpoints import STATEFUL_DOCUMENT, StopRequest
from rlxf.training.distributed import process_group
from rlxf.training.resumed_logger import replaced_events


class TrainingCommand(ABC):
    """Training of an agent in a new run folder, which can be interrupted and resumed.

    Subclasses are dataclasses of options. The attributes that are annotated here are options of all of them.
    Their order, help texts and defaults belong to each command.
    """

    agent_name: str
    """Name of the agent in ``config.json``."""
    unit = "updates"
    """Unit of progress: "steps" or "updates"."""
    metrics: dict[str, tuple[str, int]] = OFFLINE
    """Metrics that are shown with the progress, as in `progress`."""
    log_interval = 1
    """Number of rollouts or updates between two log entries."""
    core_notes: Mapping[str, str] = MappingProxyType({})
    """Field of the core -> sentence that is added to its help text."""
    pretrained: Path | None = None
    seed: int
    run: Path | None
    checkpoint_seconds: float
    progress_bar: bool
    quiet: bool
    learner: Any
    core: TransformerSpec

    @property
    @abstractmethod
    def total(self) -> int:
        """Number of steps or updates of the training."""

    @property
    @abstractmethod
    def default_name(self) -> str:
        """Agent and task, from which the default name of the run folder is made."""

    @abstractmethod
    def build(self) -> Any:
        """Load the data or make the environments, and return the agent."""

    def build_at(self, start: Start) -> Any:
        """Return the agent of a resumed run, before its checkpoint is loaded."""
        return self.build()

    def check(self) -> None:
        """Raise ValueError if an option is out of range, and FileExistsError if the run folder exists."""
        check_from_zero(self, "checkpoint_seconds", "seed")
        if self.path.exists():
            raise FileExistsError(f"{self.path} exists; choose another folder with --run, or move it away")

    def check_agent(self, agent: Any) -> None:  # noqa: B027  # optional
        """Raise ValueError or TypeError if an option does not suit the agent."""

    @classmethod
    def check_trust(cls, run: RunFolder) -> None:
        """Raise ValueError if the environment of a run needs trust."""
        check_env_trust(run.config)

    def with_trust(self) -> Self:
        """Return the options of a run whose authors are trusted."""
        return self

    def resolved_options(self, agent: Any) -> dict[str, Any]:
        """Return the options whose default depends on the agent or its data, with their values."""
        return {}

    def steps_per_rollout(self, agent: Any) -> int:
        """Return the number of steps between two updates of the weights; 1 if updates are counted."""
        return 1

    def evaluations(
        self, agent: Any, run: RunFolder
    ) -> AbstractContextManager[dict[str, EvaluationCallback]]:
        """Context manager for the callback that evaluates during the training, by its name."""
        return nullcontext({})

    def tensorboard_callbacks(self, agent: Any) -> AbstractContextManager[list[BaseCallback]]:
        """Context manager for the callbacks that write further TensorBoard output."""
        return nullcontext([])

    def finish(self, agent: Any, run: RunFolder) -> None:  # noqa: B027  # optional
        """Final stages of the run, which can be interrupted and repeated."""

    @property
    def path(self) -> Path:
        """Folder of the run."""
        name = re.sub(r"[^\w.-]+", "-", self.default_name)
        return Path("runs", f"{name}-{self.seed}") if self.run is None else self.run

    @property
    def verbose(self) -> bool:
        """True if this process shows progress."""
        return self.progress_bar and not self.quiet and process_group().is_main

    @classmethod
    def of_run(cls, run: RunFolder, progress_bar: bool, quiet: bool = False) -> Self:
        """Return the options that a run was started with.

        Raises:
            ValueError: if an option is missing in its ``config.json``.
        """
        with config_errors(run):
            return options_from_config(cls, run.config, run=run.path, progress_bar=progress_bar, quiet=quiet)

    def prepare(self) -> Callable[[], None]:
        """Check the options, build the agent, create the run, and return the training to run.

        A run that this torchrun job created before a restart is resumed.
        """
        init_distributed()
        run = restarted_run(self.path)
        if run is not None:
            return self.of_run(run, self.progress_bar, self.quiet).prepare_resume(run)
        self.check()
        agent = self.build()
        load_initial_weights(agent, self.pretrained)
        self.check_agent(agent)
        config = {"agent": self.agent_name} | options_to_config(self) | {"core": agent.core.to_dict()}
        run = create_run(self.path, config | self.resolved_options(agent))
        with error_context(run):
            agent.set_logger(rank_zero_logger(run.make_logger))
        return partial(self._train, agent, run, Start())

    def prepare_resume(self, run: RunFolder) -> Callable[[], None]:
        """Like `prepare`, to resume an interrupted run.

        Raises:
            FileNotFoundError: if it has checkpoints, and none of them is intact.
        """
        init_distributed()
        if is_complete(run, self.total):
            return partial(print_out, self.describe_completion(run))
        start = Start.of(run)
        agent = self.build_at(start)
        if start.file is None:
            load_initial_weights(agent, self.pretrained)
        self.check_agent(agent)
        agent.set_logger(rank_zero_logger(partial(run.continue_logger, start.log, start.steps)))
        return partial(self._train, agent, run, start)

    def describe_completion(self, run: RunFolder) -> str:
        """Return the message for a complete run, with the names of files that changed afterwards.

        In a process that does not write, the message is empty.
        """
        if run.completion is None:
            return ""
        changed = ", ".join(run.completion.changed(run.path))
        since = f" ({changed} changed afterwards)" if changed else ""
        return f"{run.path} is complete: {run.completion.steps:,} {self.unit}{since}"

    def _train(self, agent: Any, run: RunFolder, start: Start) -> None:
        learn, finish = partial(self._learn, agent, run, start), partial(self.finish, agent, run)
        with error_context(run), ExitStack() as stack, closing(agent.logger):
            if agent.env is not None:
                stack.callback(agent.env.close)
            if not self.quiet:
                print_out(as_table(str(run.path), run.config))
            train_to_completion(agent, run, start, self.total, learn, finish)

    def _learn(self, agent: Any, run: RunFolder, start: Start, stop: StopRequest) -> None:
        learn = partial(agent.learn, self.total, log_interval=self.log_interval)
        rollout = self.steps_per_rollout(agent)
        shown = self.verbose, self.unit, -(-self.total // rollout) * rollout, self.metrics
        with (
            self.evaluations(agent, run) as evaluations,
            self.tensorboard_callbacks(agent) as tensorboard,
            progress(*shown, [*evaluations.values(), *tensorboard]) as display,
        ):
            callbacks, seconds = [*evaluations.values(), *tensorboard, *display], self.checkpoint_seconds
            learn_resumably(agent, run, learn, callbacks, evaluations, seconds, start, stop)


EVALUATION = "evaluation"
"""Name of the evaluation callback in the state saved with each checkpoint."""
DEFAULT_EVALUATIONS = 10
"""Default largest number of evaluations in a training."""


def interval(requested: int | None, total: int, least: int = 1) -> int:
    """Return the number of steps or updates between two evaluations; 0 for no evaluation.

    Args:
        requested: the requested interval; None for a tenth of the training.
        total: steps or updates of the training.
        least: minimum of the default, e.g. the steps of a rollout: weights do not change in between.
    """
    return max(-(-total // DEFAULT_EVALUATIONS), least) if requested is None else requested


class EvaluatedTrainingCommand(TrainingCommand):
    """Training of an agent that acts: it is evaluated during the training and at the end."""

    episodes: int
    evaluate_every: int | None
    evaluation_episodes: int
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
        return interval(self.evaluate_every, self.total, self.steps_per_rollout(agent))

    def evaluation_options(self, agent: Any) -> dict[str, Any]:
        """Return further arguments of `evaluate`."""
        return {}

    def callback_options(self, agent: Any) -> dict[str, Any]:
        """Return further arguments of `EvaluationCallback`."""
        return self.evaluation_options(agent)

    def check(self) -> None:
        """Raise ValueError if an option is out of range, and FileExistsError if the run folder exists."""
        check_counts(self, "evaluation_episodes")
        check_from_zero(self, "evaluate_every")
        super().check()

    def describe_completion(self, run: RunFolder) -> str:
        """Return the message for a complete run, with the command to evaluate it."""
        message = super().describe_completion(run)
        return message and f"{message}; see: rlxf evaluate {run.path}"

    @contextmanager
    def evaluations(self, agent: Any, run: RunFolder) -> Iterator[dict[str, EvaluationCallback]]:
        """Context manager for the callback that evaluates during the training, by its name."""
        every, episodes = self.evaluation_interval(agent), self.evaluation_episodes
        if not every or not process_group().is_main:
            yield {}
            return
        options, on_new_best = self.callback_options(agent), partial(_save_statistics, agent, run)
        with self.fresh_env(agent, episodes) as env:
            callback = EvaluationCallback(
                env,
                episodes,
                every,
                best_path=run.best,
                on_new_best=on_new_best,
                budget=self.evaluation_budget if self.evaluate_every is None else None,
                **options,
            )
            yield {EVALUATION: callback}

    def finish(self, agent: Any, run: RunFolder) -> None:
        """Evaluate and report the last checkpoint, and the best one if there is one."""
        if not process_group().is_main:
            return
        with self.fresh_env(agent, self.episodes) as env:
            agents = {"last": agent} | self._best(run, env)
            reports = {"last": self._report(agent, env, agent.logger)}
            if "best" in agents:
                with replaced_events(run.path / FOLDERS["best"]) as writer:
                    reports["best"] = self._report(agents["best"], env, writer)
        print_reports(agents, reports)
        if summary := self._describe_best(run):
            print_out(summary)
        plot_targets(reports, {"last": run.path, "best": run.path / FOLDERS["best"]})

    def _best(self, run: RunFolder, env: VecEnv) -> dict[str, Any]:
        return {"best": load_agent(run, env, run.best, self.learner.device)} if run.best.is_file() else {}

    def _report(self, agent: Any, env: VecEnv, logger: Logger | SummaryWriter) -> Report | TargetSweep:
        options = self.evaluation_options(agent)
        return evaluate(agent, env, self.episodes, progress_bar=self.verbose, logger=logger, **options)

    def _describe_best(self, run: RunFolder) -> str:
        """Return one line with the best evaluation and the path of its checkpoint; "" if there is none."""
        state = read_archive(run.checkpoints.newest()).documents.get(STATEFUL_DOCUMENT, {}).get(EVALUATION)
        if not run.best.is_file() or state is None or state["best"] is None:
            return ""
        unit = self.unit.removesuffix("s")
        return (
            f"best evaluation during training: mean return {state['best']:.4g} at {unit} "
            f"{state['best_step']:,}, saved in {run.best}"
        )

    @contextmanager
    def fresh_env(self, agent: Any, episodes: int) -> Iterator[VecEnv]:
        """Yield environments for an evaluation, and close them afterwards."""
        with preserve_rng_state():  # without a seed, SB3 draws from NumPy's global generator
            env = self.make_env(agent, episodes)
        with closing(env):
            yield env


def _save_statistics(agent: Any, run: RunFolder) -> None:
    """Save the normalization statistics of the best agent, if there are any."""
    normalizer = agent.get_vec_normalize_env()
    if normalizer is not None:
        save_normalizer(run.best_normalizer, normalizer)
