"""A training that is saved while it goes on, stops where it can be resumed, and is completed step by step."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from signal import Signals
from typing import Any, Self, TypeVar

from rlxf import __version__
from rlxf.cli.keeping import keep
from rlxf.cli.mistakes import leave
from rlxf.cli.task import trust_option
from rlxf.cli.together import deafen
from rlxf.training import Checkpoints, RunFolder, read_archive, stop_on_signals
from rlxf.training.checkpoints import BESIDE, Stateful
from rlxf.training.described import described
from rlxf.training.joining import here
from rlxf.training.log_files import LogPosition
from rlxf.training.stopping import RESUMABLE, Stop, Stopped, handled, raise_stopped

LOG = "log"
"""Name of the state of the log files in a checkpoint, next to those of callbacks."""
Options = TypeVar("Options")


@dataclass(frozen=True)
class Start:
    """The point of a run at which its training starts.

    Args:
        file: the checkpoint to resume from; None for the beginning.
        steps: steps or updates before it.
        log: how much was logged before it.
    """

    file: Path | None = None
    steps: int = 0
    log: LogPosition = field(default_factory=LogPosition)

    @classmethod
    def of(cls, run: RunFolder) -> Self:
        """The newest whole checkpoint of a run. One that was killed before its first has to begin again.

        Raises:
            FileNotFoundError: if no checkpoint is whole, or there is only one of weights.
            CheckpointError: if it was not written by a command that trains.
        """
        if not run.checkpoints.files() and not run.checkpoint.is_file():
            return cls()
        file = run.checkpoints.newest()
        with described():
            documents = read_archive(file).documents
            steps = int(documents["agent"]["progress"]["num_timesteps"])
            return cls(file, steps, LogPosition.from_json(documents[BESIDE][LOG]))


def is_complete(run: RunFolder, total: int) -> bool:
    """Whether a run of so many steps has its completion marker: the process that writes decides for all."""
    done = here().writes and run.completion is not None and run.completion.steps >= total
    return bool(here().largest(int(done)))


def told_complete(run: RunFolder, unit: str, hint: str = "") -> str:
    """Text that says that a run is complete, and which of its files were changed since.

    Args:
        run: has its completion marker, at least in the process that writes.
        unit: "steps" or "updates".
        hint: what to do with it.
    """
    if run.completion is None:
        return ""
    changed = ", ".join(run.completion.changed(run.path))
    since = f" ({changed} changed since)" if changed else ""
    return f"{run.path} has all of its {run.completion.steps} {unit}{since}{hint}"


def train_to_completion(
    agent: Any,
    run: RunFolder,
    start: Start,
    total: int,
    learn: Callable[[Stop], None],
    finish: Callable[[], None],
) -> None:
    """Train to the end, save the agent, do what is left, and write the completion marker last.

    What comes after the last update depends on its checkpoint alone. So where it is interrupted, all of it is
    repeated by ``rlxf resume``, and replaces what was written before. After a signal the process leaves with
    status 75.

    Args:
        agent: learns.
        run: where it is saved.
        start: where to go on from.
        total: steps or updates of the run.
        learn: trains until ``total``, e.g. by `learn_resumably`; it is not called if ``start`` is there.
        finish: e.g. the last evaluation; it can be interrupted at any moment and repeated.
    """
    with stop_on_signals() as stop:
        if start.file is None or start.steps < total:
            learn(stop)
        else:
            agent.load_training_state(start.file)
            keep(agent, run)
        _complete(agent, run, finish, stop)


def _complete(agent: Any, run: RunFolder, finish: Callable[[], None], stop: Stop) -> None:
    try:
        with handled(raise_stopped):
            if stop.by is not None:
                raise Stopped(stop.by)
            finish()
            agent.logger.close()
            if here().writes:
                run.complete(agent.num_timesteps)
    except Stopped as stopped:
        _leave(stopped.by, run)


def learn_resumably(
    agent: Any,
    run: RunFolder,
    learn: Callable[..., Any],
    callbacks: list[Any],
    beside: Mapping[str, Stateful],
    every_seconds: float,
    start: Start,
    stop: Stop,
) -> None:
    """Train to the end, or leave with status 75 after a signal; what was learned is kept.

    Several processes leave together, once it is kept.

    Args:
        agent: learns.
        run: where it is saved, every so many seconds and at the end.
        learn: the agent's, but for ``callback`` and ``resume_from``.
        callbacks: SB3's.
        beside: those among them that go on with the training, by name.
        every_seconds: from one checkpoint to the next.
        start: where to go on from.
        stop: says whether to stop.
    """
    saving = Checkpoints(run.checkpoints, every_seconds, {**beside, LOG: run.log_files}, stop)
    if start.file is not None:
        _take_up(beside, start.file)
    try:
        try:
            learn(callback=[*callbacks, saving], resume_from=start.file)
        finally:
            keep(agent, run)
        signal = here().largest(int(stop.by or 0))  # also one after the last update, to any of them
    except ConnectionError:
        deafen()
        raise
    if signal:
        _leave(Signals(signal), run)


@contextmanager
def config_read(run: RunFolder) -> Iterator[None]:
    """While options are taken from the ``config.json`` of a run, name the run if one is missing.

    Raises:
        ValueError: in place of the KeyError.
    """
    try:
        yield
    except KeyError as error:
        raise ValueError(
            f"{run.path} cannot be resumed: its config.json lacks {error}. It was altered, or another "
            f"version of rlxf than {__version__} started the run"
        ) from error


def options_of(kind: type[Options], config: Mapping[str, Any]) -> Options:
    """An object of options as ``config.json`` keeps them.

    Raises:
        KeyError: if one is missing.
    """
    return kind(**{each.name: config[each.name] for each in fields(kind)})  # type: ignore[arg-type]


def _take_up(beside: Mapping[str, Stateful], cut_off: Path) -> None:
    before = read_archive(cut_off).documents[BESIDE]
    for name, each in beside.items():
        each.take_up(before[name])


def _leave(signal: Signals, run: RunFolder) -> None:
    deafen()
    if not here().writes:
        sys.exit(RESUMABLE)
    leave(
        f"stopped by {signal.name}; go on with: rlxf resume {run.path}{trust_option(run.config)}", RESUMABLE
    )
