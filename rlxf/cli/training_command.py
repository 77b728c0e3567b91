"""Base class of the commands that train an agent in a run folder."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from stable_baselines3.common.callbacks import BaseCallback
from tyro.constructors import ConstructorRegistry

from rlxf import __version__
from rlxf.attention import TransformerSpec
from rlxf.cli.env_options import check_env_trust
from rlxf.cli.options import (
    Command,
    check_new_folder,
    check_options_not_negative,
    default_run_path,
    given_command,
)
from rlxf.cli.output import print_out
from rlxf.cli.progress import OFFLINE_METRICS, progress
from rlxf.cli.run_options import check_config_types, check_core_memory, options_from_config, options_to_config
from rlxf.cli.runs import load_initial_weights
from rlxf.cli.settings_table import print_settings
from rlxf.cli.spec_options import add_core_rule
from rlxf.cli.torchrun_job import create_run, init_distributed, rank_zero_logger, restarted_run
from rlxf.cli.training_session import (
    StartPoint,
    covers_total,
    error_context,
    learn_resumably,
    train_to_completion,
)
from rlxf.training import RunFolder, read_archive
from rlxf.training.checkpoints import STATEFUL_DOCUMENT
from rlxf.training.distributed import process_group
from rlxf.training.tensorboard import write_run_texts
from rlxf.training.trackers import check_tracker, tracked
from rlxf.utils.files import try_lock_folder
from rlxf.utils.run_files import CONFIG
from rlxf.utils.signals import StopRequest


class TrainingCommand(Command):
    """Training of an agent in a new run folder, which can be interrupted and resumed.

    Subclasses are dataclasses of options. The attributes that are annotated here, except `agent_name` and
    `metrics`, are options of all of them. Each command declares their order, help texts and defaults.
    """

    agent_name: str
    """Name of the agent in ``config.json``."""
    unit = "updates"
    """Unit of progress: "steps" or "updates"."""
    total_name = "updates"
    """Name of the option with the number of steps or updates of the training."""
    metrics: dict[str, tuple[str, int]] = OFFLINE_METRICS
    """Metrics that are shown with the progress, as in `progress`."""
    log_interval = 1
    """Number of rollouts or updates between two log entries."""
    pretrained: Path | None = None
    seed: int
    run: Path | None
    config: Path | None
    checkpoint_seconds: float
    progress_bar: bool
    quiet: bool
    track: str | None
    learner: Any
    core: TransformerSpec

    @classmethod
    def registry(cls, args: Sequence[str]) -> ConstructorRegistry:
        """Return the tyro registry that parses ``args``, with the options of the core."""
        registry = super().registry(args)
        add_core_rule(registry, args)
        return registry

    @property
    def total(self) -> int:
        """Number of steps or updates of the training."""
        return int(getattr(self, self.total_name))

    def extended(self, run: RunFolder, total: int) -> Self:
        """Return the options of a run with another total number of steps or updates.

        Raises:
            ValueError: if ``total`` is less than 1, if the run has made more steps or updates, unless it is
                the present total, or if the run ended early.
        """
        start = StartPoint.of(run)
        completion = run.completion
        done = start.steps if completion is None else max(start.steps, completion.steps)
        if start.ended_early or (completion is not None and completion.ended_early):
            raise ValueError(
                f"{run.path} ended after {done:,} {self.unit}, because an evaluation reached its "
                f"--stop-return: to train for longer, start a new run without it"
            )
        # A run makes whole rollouts, so it may have made more steps than its total.
        if total < max(done, 1) and total != run.config.get(self.total_name):
            raise ValueError(
                f"{run.path} has made {done:,} {self.unit}, got --{self.total_name.replace('_', '-')} "
                f"{total}: give a larger total, or start a new run"
            )
        return replace(self, **{self.total_name: total})  # type: ignore[type-var]  # dataclasses

    @property
    @abstractmethod
    def default_name(self) -> str:
        """Agent and task, from which the default name of the run folder is made."""

    @abstractmethod
    def build(self) -> Any:
        """Load the data or make the environments, and return the agent."""

    def build_for_resume(self, start: StartPoint) -> Any:
        """Return the agent to continue from ``start``, before its checkpoint is loaded.

        By default `build`. A subclass can omit training data that is no longer needed.
        """
        return self.build()

    def check(self) -> None:
        """Raise ValueError or TypeError if an option is out of range, or a schedule or choice is invalid."""
        check_options_not_negative(self, "checkpoint_seconds", "seed")
        self.learner.arguments()

    def check_agent(self, agent: Any) -> None:  # optional
        """Raise ValueError or TypeError if an option does not suit the agent."""

    @classmethod
    def check_trust(cls, run: RunFolder) -> None:
        """Raise ValueError if the environment of a run needs trust."""
        check_env_trust(run.config)

    def with_trust(self) -> Self:
        """Return these options, with trust in the authors of the run and of its data."""
        return self

    def resolved_options(self, agent: Any) -> dict[str, Any]:
        """Return the options whose default depends on the agent or its data, with their values."""
        return {}

    def core_config(self, agent: Any) -> dict[str, Any]:
        """Return the entry of the core in ``config.json``; empty for an agent without a transformer."""
        return {"core": agent.core.to_dict()}

    def check_memory(self, run: RunFolder) -> None:
        """Raise ValueError if the options of a run need more memory than the budget allows."""
        check_core_memory(run, self.core, self.learner.memory_usage)

    def steps_per_rollout(self, agent: Any) -> int:
        """Return the number of steps between two updates of the weights; 1 if updates are counted."""
        return 1

    def callbacks(self, agent: Any, run: RunFolder) -> AbstractContextManager[list[BaseCallback]]:
        """Context manager for the callbacks of the training in the process of rank 0."""
        return nullcontext([])

    def finish(self, agent: Any, run: RunFolder) -> None:  # optional
        """Final stages of the run in the process of rank 0, which can be interrupted and repeated."""

    @property
    def path(self) -> Path:
        """Folder of the run."""
        return default_run_path(self.default_name, self.seed) if self.run is None else self.run

    @property
    def verbose(self) -> bool:
        """True if this process shows progress."""
        return self.progress_bar and not self.quiet and process_group().is_main

    @classmethod
    def of_run(cls, run: RunFolder, progress_bar: bool, quiet: bool = False) -> Self:
        """Return the options that a run was started with.

        Raises:
            ValueError: if an option in its ``config.json`` is missing or has another type, or the options
                need more memory than the budget allows.
        """
        check_config_types(cls, run.config, run.path / CONFIG)
        try:
            training = options_from_config(
                cls, run.config, run=run.path, progress_bar=progress_bar, quiet=quiet
            )
        except KeyError as error:
            raise ValueError(
                f"{run.path}: {error} is missing in its config.json. The file was changed, "
                f"or written by a version of rlxf other than {__version__}"
            ) from error
        training.check_memory(run)
        return training

    def prepare(self) -> Callable[[], None]:
        """Check the options, build the agent, create the run, and return the training to run.

        A run that this torchrun job created before a restart is resumed.
        """
        init_distributed()
        run = restarted_run(self.path)
        if run is not None:
            return self.of_run(run, self.progress_bar, self.quiet).prepare_resume(run)
        self.check()
        check_new_folder(self.path)
        check_tracker(self.track)
        agent = self.build()
        agent.check_processes()
        load_initial_weights(agent, self.pretrained)
        self.check_agent(agent)
        config = {"agent": self.agent_name} | options_to_config(self) | self.core_config(agent)
        run = create_run(self.path, config | self.resolved_options(agent))
        with _locked(run) as lock:
            with error_context(run):
                agent.set_logger(rank_zero_logger(tracked(run.make_logger, self.track, run)))
            write_run_texts(agent.logger, given_command(), run.config, 0)
            return partial(self._train, agent, run, StartPoint(), lock.pop_all())

    def prepare_resume(self, run: RunFolder) -> Callable[[], None]:
        """Like `prepare`, to resume an interrupted run.

        Raises:
            FileNotFoundError: if it has checkpoints, and none of them is intact.
            BlockingIOError: if another process trains in the folder of the run.
        """
        init_distributed()
        if covers_total(run, self.total):
            return partial(print_out, self.describe_completion(run))
        check_tracker(self.track)
        with _locked(run) as lock:
            return partial(self._train, *self._resumed(run), lock.pop_all())

    def _resumed(self, run: RunFolder) -> tuple[Any, RunFolder, StartPoint]:
        """Return the agent to continue, with a logger that continues the logs, its run and start point."""
        start = StartPoint.of(run)
        agent = self.build_for_resume(start)
        if start.file is None:
            load_initial_weights(agent, self.pretrained)
        self.check_agent(agent)
        if start.file is not None:  # before a file of the run is changed
            agent.check_training_state(start.file)
        run = self._with_total(run)
        make_logger = partial(run.continue_logger, start.log, start.steps)
        agent.set_logger(rank_zero_logger(tracked(make_logger, self.track, run)))
        write_run_texts(agent.logger, given_command(), run.config, start.steps)
        return agent, run, start

    def _with_total(self, run: RunFolder) -> RunFolder:
        """Write the total of these options into ``config.json``, and remove an outdated completion marker.

        The configuration is written first: a marker with fewer steps than the new total counts as none.
        """
        unchanged = run.config[self.total_name] == self.total and not run.has_marker
        if unchanged or not process_group().is_main:
            return run
        return run.reconfigured(**{self.total_name: self.total})

    def describe_completion(self, run: RunFolder) -> str:
        """Return the message for a complete run, with the names of files that changed afterwards.

        In a process that does not write, the message is empty.
        """
        if run.completion is None:
            return ""
        changed = ", ".join(run.completion.changed(run.path))
        since = f" ({changed} changed afterwards)" if changed else ""
        return f"{run.path} is complete: {run.completion.steps:,} {self.unit}{since}"

    def describe_selection(self, run: RunFolder, state_name: str, file: Path, title: str) -> str:
        """Return one line with the best value of a callback and its checkpoint; "" if there is none.

        Args:
            run: folder of the run.
            state_name: name of the state of the callback in checkpoints.
            file: checkpoint that the callback saved.
            title: text before the value.
        """
        if not file.is_file():
            return ""
        states = read_archive(run.resume_checkpoints.newest()).documents.get(STATEFUL_DOCUMENT, {})
        state = states.get(state_name)
        if state is None or state["best"] is None:
            return ""
        unit = self.unit.removesuffix("s")
        return f"{title} {state['best']:.4g} at {unit} {state['best_step']:,}, saved in {file}"

    def _train(self, agent: Any, run: RunFolder, start: StartPoint, lock: ExitStack) -> None:
        learn, finish = partial(self._learn, agent, run, start), partial(self.finish, agent, run)
        with error_context(run), lock as stack, closing(agent.logger):
            if agent.env is not None:
                stack.callback(agent.env.close)
            if not self.quiet:
                print_settings(run, self, agent)
            train_to_completion(agent, run, start, self.total, learn, finish)

    def _learn(self, agent: Any, run: RunFolder, start: StartPoint, stop: StopRequest) -> None:
        learn = partial(agent.learn, self.total, log_interval=self.log_interval)
        rollout = self.steps_per_rollout(agent)
        total = -(-self.total // rollout) * rollout
        with (
            self.callbacks(agent, run) if process_group().is_main else nullcontext([]) as callbacks,
            progress(self.verbose, self.unit, total, self.metrics, callbacks) as display,
        ):
            seconds = self.checkpoint_seconds
            learn_resumably(agent, run, learn, [*callbacks, *display], seconds, start, stop)


@contextmanager
def _locked(run: RunFolder) -> Iterator[ExitStack]:
    """Context manager for a stack that locks the folder of a run in the process of rank 0.

    Raises:
        BlockingIOError: if another process trains in the folder.
    """
    with ExitStack() as stack:
        if process_group().is_main and not try_lock_folder(run.path, stack):
            raise BlockingIOError(f"another process trains in {run.path}: wait until it ends, or stop it")
        yield stack
