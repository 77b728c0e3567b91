"""Training runs with periodic checkpoints, which can be interrupted and resumed."""

import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any, Self

from rlxf.cli.error_reporting import exit_with
from rlxf.cli.finalize_run import save_agent
from rlxf.cli.options.env_options import trust_option
from rlxf.cli.torchrun_job import ignore_signals
from rlxf.evaluation.callback import PeriodicCallback
from rlxf.training import CheckpointWriter, RunFolder, read_archive, stop_on_signals
from rlxf.training.checkpoints import (
    EXIT_RESUMABLE,
    STATEFUL_DOCUMENT,
    Interrupted,
    Stateful,
    StopRequest,
    raise_interrupted,
    signal_handler,
)
from rlxf.training.compat import checkpoint_errors
from rlxf.training.distributed import process_group
from rlxf.training.resumed_logger import LogPosition

LOG = "log"
"""Name of the state of the log files in a checkpoint, next to the states of callbacks."""


@dataclass(frozen=True)
class Start:
    """Point of a run from which its training starts.

    Args:
        file: checkpoint to resume from; None to start from the beginning.
        steps: number of steps or updates before this point.
        log: position in the log files at this point.
    """

    file: Path | None = None
    steps: int = 0
    log: LogPosition = field(default_factory=LogPosition)

    @classmethod
    def of(cls, run: RunFolder) -> Self:
        """Return the newest intact checkpoint. A run without any checkpoint starts from the beginning.

        Raises:
            FileNotFoundError: if no checkpoint is intact, or there is only ``checkpoint.zip``.
            CheckpointError: if the checkpoint was not written by a training command.
        """
        if not run.checkpoints.files() and not run.checkpoint.is_file():
            return cls()
        file = run.checkpoints.newest()
        with checkpoint_errors():
            documents = read_archive(file).documents
            steps = int(documents["agent"]["progress"]["num_timesteps"])
            return cls(file, steps, LogPosition.from_json(documents[STATEFUL_DOCUMENT][LOG]))


def is_complete(run: RunFolder, total: int) -> bool:
    """Return whether the run has a completion marker for ``total`` steps; the writing process decides."""
    done = process_group().is_main and run.completion is not None and run.completion.steps >= total
    return bool(process_group().all_reduce_max(int(done)))


def train_to_completion(
    agent: Any,
    run: RunFolder,
    start: Start,
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
        learn: trains up to ``total``, e.g. with `learn_resumably`; skipped if ``start`` is at ``total``.
        finish: final stages, e.g. the last evaluation; they can be interrupted at any time and repeated.
    """
    with stop_on_signals() as stop:
        if start.file is None or start.steps < total:
            learn(stop)
        else:
            agent.load_training_state(start.file)
            save_agent(agent, run)
        _complete(agent, run, finish, stop)


def _complete(agent: Any, run: RunFolder, finish: Callable[[], None], stop: StopRequest) -> None:
    try:
        with signal_handler(raise_interrupted):
            if stop.signal is not None:
                raise Interrupted(stop.signal)
            finish()
            agent.logger.close()
            if process_group().is_main:
                run.complete(agent.num_timesteps)
    except Interrupted as stopped:
        _leave(stopped.signal, run)


def learn_resumably(
    agent: Any,
    run: RunFolder,
    learn: Callable[..., Any],
    callbacks: list[Any],
    stateful: Mapping[str, Stateful],
    every_seconds: float,
    start: Start,
    stop: StopRequest,
) -> None:
    """Train to the end, or exit with status 75 after a signal. The progress is saved in both cases.

    Several processes exit together after the progress is saved. In a single process, a signal during an
    evaluation or a video ends it at its next step. The checkpoint is then the last one before it, so the
    resumed run repeats it.

    Args:
        agent: agent to train.
        run: folder of the run.
        learn: ``agent.learn`` with all arguments except ``callback`` and ``resume_from``.
        callbacks: callbacks of SB3.
        stateful: callbacks among these whose state is saved in checkpoints, by name. Those that act
            periodically are added.
        every_seconds: seconds between two checkpoints.
        start: point to continue from.
        stop: reports whether to stop.
    """
    periodic = [each for each in callbacks if isinstance(each, PeriodicCallback)]
    if process_group().world_size == 1:
        for each in periodic:
            each.on_env_step = stop.check
    others = {type(each).__name__: each for each in periodic if each not in stateful.values()}
    stateful = {**stateful, **others}
    saving = CheckpointWriter(
        run.checkpoints,
        every_seconds,
        {**stateful, LOG: run.log_files},
        stop,
        lambda step: any(each.is_due(step) for each in periodic),
    )
    if start.file is not None:
        _load_states(stateful, start.file)
    try:
        restart = False
        try:
            with closing(saving):  # an error names the checkpoint to resume from, which may be in writing
                learn(callback=[*callbacks, saving], resume_from=start.file)
        except Interrupted:
            restart = not run.checkpoints.files()  # checkpoint.zip would make the run appear trained
        finally:
            if not restart:
                save_agent(agent, run)
        # of all processes, also after the last update
        signal = process_group().all_reduce_max(int(stop.signal or 0))
    except ConnectionError:
        ignore_signals()
        raise
    if signal:
        _leave(Signals(signal), run)


def _load_states(stateful: Mapping[str, Stateful], checkpoint: Path) -> None:
    states = read_archive(checkpoint).documents[STATEFUL_DOCUMENT]
    for name, callback in stateful.items():
        if name in states:  # videos may have become possible since
            callback.load_state(states[name])


def _leave(signal: Signals, run: RunFolder) -> None:
    ignore_signals()
    if not process_group().is_main:
        sys.exit(EXIT_RESUMABLE)
    exit_with(
        f"stopped by {signal.name}; resume with: rlxf resume {run.path}{trust_option(run.config)}",
        EXIT_RESUMABLE,
    )
