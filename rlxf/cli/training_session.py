"""Training runs with periodic checkpoints, which can be interrupted and resumed."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shlex import quote
from signal import Signals
from typing import Any, Self

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback

from rlxf.cli.env_options import resume_trust_option
from rlxf.cli.output import exit_with, print_out
from rlxf.cli.runs import SOURCES, TRAINING_COMMANDS
from rlxf.cli.torchrun_job import ignore_signals
from rlxf.evaluation.callback import EvaluationCallback
from rlxf.evaluation.periodic import PeriodicCallback
from rlxf.training import (
    CheckpointError,
    CheckpointWriter,
    NumericalError,
    ResumeError,
    RunFolder,
    read_archive,
    save_normalizer,
)
from rlxf.training.checkpoints import EXIT_RESUMABLE, STATEFUL_DOCUMENT
from rlxf.training.compat import checkpoint_errors
from rlxf.training.distributed import process_group
from rlxf.training.resumed_logger import LogPosition
from rlxf.utils.errors import FaultyEnvironmentError
from rlxf.utils.signals import (
    ReceivedSignal,
    StopRequest,
    raise_on_signal,
    signal_handler,
    stop_on_signals,
)

LOG_STATE, EVALUATION_STATE = "log", "evaluation"
"""Names of the states of log files and of evaluations in a checkpoint, in addition to those of callbacks."""


@dataclass(frozen=True)
class StartPoint:
    """Point of a run from which its training starts.

    Args:
        file: checkpoint to resume from; None to start from the beginning.
        steps: number of steps or updates before this point.
        log: position in the log files at this point.
        ended_early: whether an evaluation at or before this point reached ``--stop-return``.
    """

    file: Path | None = None
    steps: int = 0
    log: LogPosition = field(default_factory=LogPosition)
    ended_early: bool = False

    @classmethod
    def of(cls, run: RunFolder) -> Self:
        """Return the start point at the newest intact checkpoint.

        A run without any checkpoint starts from the beginning.

        Raises:
            FileNotFoundError: if no checkpoint is intact, or there is only ``checkpoint.zip``, as in a run
                that was shared.
            CheckpointError: if the checkpoint was not written by a training command.
        """
        if not run.resume_checkpoints.files():
            if run.final_checkpoint.is_file():
                raise FileNotFoundError(_only_weights(run))
            return cls()
        file = run.resume_checkpoints.newest()
        with checkpoint_errors():
            documents = read_archive(file).documents
            steps = int(documents["agent"]["progress"]["num_timesteps"])
            states = documents[STATEFUL_DOCUMENT]
            best, stop_return = states.get(EVALUATION_STATE, {}).get("best"), run.config.get("stop_return")
            ended_early = None not in (best, stop_return) and best >= stop_return
            return cls(file, steps, LogPosition.from_json(states[LOG_STATE]), ended_early)

    def needs_training(self, total: int) -> bool:
        """Return whether a run with ``total`` steps or updates has to be trained from this point."""
        return self.file is None or (self.steps < total and not self.ended_early)


def _only_weights(run: RunFolder) -> str:
    path, agent = quote(str(run.path)), run.config.get("agent", "")
    weights = f" --pretrained {path}" if agent in SOURCES else ""
    states, trust = run.resume_checkpoints.path, resume_trust_option({**run.config, "pretrained": None})
    return (
        f"{run.path} has weights, but no training state in {states}, which is usual for a shared run: begin "
        f"a new run with rlxf {TRAINING_COMMANDS[agent]} --config {path}{weights} --run NEW{trust}"
    )


def covers_total(run: RunFolder, total: int) -> bool:
    """Return whether the run has a completion marker that covers ``total`` steps.

    The answer of the process of rank 0 holds for all processes.
    """
    done = process_group().is_main and run.completion is not None and run.completion.covers(total)
    return bool(process_group().all_reduce_max(int(done)))


def train_to_completion(
    agent: Any,
    run: RunFolder,
    start: StartPoint,
    total: int,
    learn: Callable[[StopRequest], None],
    finish: Callable[[], None],
) -> None:
    """Train to the end, save the agent, run the final stages, and write the completion marker last.

    All stages after the last update depend only on its checkpoint. If they are interrupted, ``rlxf resume``
    repeats all of them and replaces their files. After a signal the process exits with status 75.

    Args:
        agent: agent to train.
        run: folder of the run.
        start: point to continue from.
        total: steps or updates of the run.
        learn: trains to the end, e.g. with `learn_resumably`; skipped if ``start`` needs no training.
        finish: final stages in the process of rank 0, e.g. the last evaluation; they can be interrupted at
            any time and repeated.
    """
    with stop_on_signals() as stop:
        if start.needs_training(total):
            learn(stop)
        else:
            assert start.file is not None
            agent.load_training_state(start.file)
            save_agent(agent, run)
        try:
            with signal_handler(raise_on_signal):
                stop.check()
                if process_group().is_main:
                    finish()
                    agent.logger.close()
                    run.complete(agent.num_timesteps, ended_early=agent.num_timesteps < total)
        except ReceivedSignal as stopped:
            _exit_resumable(stopped.signal, run)


def learn_resumably(
    agent: Any,
    run: RunFolder,
    learn: Callable[..., Any],
    callbacks: list[BaseCallback],
    every_seconds: float,
    start: StartPoint,
    stop: StopRequest,
) -> None:
    """Train to the end, or exit with status 75 after a signal. The progress is saved in both cases.

    Several processes exit together after the progress is saved. In a single process, a signal during an
    evaluation or a video stops this work at its next environment step. The newest checkpoint is then the last
    one before this work, so the resumed run repeats the work.

    Args:
        agent: agent to train.
        run: folder of the run.
        learn: ``agent.learn`` with all arguments except ``callback`` and ``resume_from``.
        callbacks: callbacks of SB3. The states of those that act periodically are saved in checkpoints.
        every_seconds: seconds between two checkpoints.
        start: point to continue from.
        stop: reports whether to stop.
    """
    periodic = _periodic_callbacks(callbacks)
    if process_group().world_size == 1:
        for each in periodic.values():
            each.on_env_step = stop.check
    saving = CheckpointWriter(
        run.resume_checkpoints,
        every_seconds,
        {**periodic, LOG_STATE: run.log_files},
        stop,
        lambda step: any(each.is_due(step) for each in periodic.values()),
    )
    if start.file is not None:
        _load_states(periodic, start.file)
    learn_all = partial(learn, callback=[*callbacks, saving], resume_from=start.file)
    try:
        _learn_and_save(agent, run, learn_all, saving)
        # a signal that any process received, even after the last update
        signal = process_group().all_reduce_max(int(stop.signal or 0))
    except ConnectionError:
        ignore_signals()
        raise
    if signal:
        _exit_resumable(Signals(signal), run)


def _learn_and_save(agent: Any, run: RunFolder, learn: Callable[[], Any], saving: CheckpointWriter) -> None:
    """Train, and save the agent, also after an error or an interruption.

    Nothing is saved after an interruption before the first checkpoint: the resumed run starts again.
    """
    restart = False
    try:
        # on errors, closing completes the checkpoint to which the error message refers
        with closing(saving):
            learn()
    except ReceivedSignal:
        restart = not run.resume_checkpoints.files()  # checkpoint.zip would make the run appear trained
    finally:
        if not restart:
            save_agent(agent, run)


def _periodic_callbacks(callbacks: list[BaseCallback]) -> dict[str, PeriodicCallback]:
    """Return name of the state in checkpoints -> callback."""
    return {
        EVALUATION_STATE if isinstance(each, EvaluationCallback) else type(each).__name__: each
        for each in callbacks
        if isinstance(each, PeriodicCallback)
    }


def _load_states(callbacks: Mapping[str, PeriodicCallback], checkpoint: Path) -> None:
    with checkpoint_errors():
        states = read_archive(checkpoint).documents[STATEFUL_DOCUMENT]
        for name in callbacks.keys() & states.keys():  # videos may have become possible since
            callbacks[name].load_state(states[name])


def save_agent(agent: BaseAlgorithm, run: RunFolder) -> None:
    """Save the agent and its normalization statistics. With several processes, only one of them saves.

    If the agent made no update, nothing is saved, and the folder of the run is removed. The folder stays if
    it has checkpoints: loading them failed, or the resumed run was stopped before its first update.
    """
    if not process_group().is_main:
        return
    if agent._n_updates == 0:
        agent.logger.close()
        if not run.resume_checkpoints.files():
            run.discard()
            print_out(f"no update was made: {run.path} is removed")
        return
    agent.save(run.final_checkpoint)
    save_statistics(agent, run.normalizer)
    print_out(f"checkpoint: {run.final_checkpoint}")


def save_statistics(agent: BaseAlgorithm, file: Path) -> None:
    """Save the normalization statistics of an agent, if there are any."""
    normalizer = agent.get_vec_normalize_env()
    if normalizer is not None:
        save_normalizer(file, normalizer)


def _exit_resumable(signal: Signals, run: RunFolder) -> None:
    ignore_signals()
    if not process_group().is_main:
        sys.exit(EXIT_RESUMABLE)
    exit_with(
        f"stopped by {signal.name}; resume with: {_resume_command(run)}",
        EXIT_RESUMABLE,
    )


def _resume_command(run: RunFolder) -> str:
    """Return the command that resumes a run, for a shell."""
    return f"rlxf resume {quote(str(run.path))}{resume_trust_option(run.config)}"


@contextmanager
def error_context(run: RunFolder) -> Iterator[None]:
    """Add the folder of the run, and how to resume it, to certain errors.

    These are disk errors, environment errors and numerical errors.

    The folder is removed if a signal ends the process before anything was saved.

    Raises:
        OSError: replaces an `OSError`.
        SystemExit: with status 2 and one line; replaces `FaultyEnvironmentError`, `NumericalError`,
            `CheckpointError` and `ResumeError`.
    """
    try:
        yield
    except OSError as error:
        raise OSError(_failure(run, error)) from error
    except (FaultyEnvironmentError, NumericalError) as error:
        exit_with(_failure(run, error), 2)
    except (CheckpointError, ResumeError) as error:
        exit_with(str(error), 2)
    except (ReceivedSignal, KeyboardInterrupt):
        saved = run.resume_checkpoints.files() or run.final_checkpoint.is_file()
        if process_group().is_main and run.path.exists() and not saved:
            run.discard()
        raise


def _failure(run: RunFolder, error: Exception) -> str:
    resume_files = run.resume_checkpoints.files()
    is_saved = run.final_checkpoint.is_file()
    remedies = {
        f"resume with: {_resume_command(run)}": bool(resume_files),
        f"start a new run from its weights with --pretrained {quote(str(run.path))}": is_saved,
    }
    advice = ", or ".join(remedy for remedy, available in remedies.items() if available)
    return f"the run in {run.path} failed: {error}.{advice and f' Fix the cause, then {advice}'}"
