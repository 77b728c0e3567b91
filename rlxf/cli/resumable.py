"""A training that is saved while it goes on, and that stops where it can be resumed."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from signal import Signals
from typing import Any, TypeVar

from stable_baselines3.common.base_class import BaseAlgorithm

from rlxf import __version__
from rlxf.cli.keeping import keep
from rlxf.cli.mistakes import leave
from rlxf.cli.together import deafen
from rlxf.training import Checkpoints, RunFolder, read_archive, stop_on_signals
from rlxf.training.checkpoints import BESIDE, Stateful
from rlxf.training.joining import here
from rlxf.training.stopping import RESUMABLE

Options = TypeVar("Options")


def learn_resumably(
    agent: BaseAlgorithm,
    run: RunFolder,
    learn: Callable[..., Any],
    callbacks: list[Any],
    beside: Mapping[str, Stateful],
    every_seconds: float,
    cut_off: Path | None,
) -> None:
    """Train to the end, or leave with status 75 behind a signal; what was learned is kept.

    Several processes leave together, once it is kept.

    Args:
        agent: learns.
        run: where it is saved, every so many seconds and at the end.
        learn: the agent's, but for ``callback`` and ``resume_from``.
        callbacks: SB3's.
        beside: those among them that go on with the training, by name.
        every_seconds: from one checkpoint to the next.
        cut_off: the file to go on from; None for a fresh training.
    """
    try:
        with stop_on_signals() as stop:
            saving = Checkpoints(run.checkpoints, every_seconds, beside, stop)
            if cut_off is not None:
                _take_up(beside, cut_off)
            try:
                learn(callback=[*callbacks, saving], resume_from=cut_off)
            finally:
                keep(agent, run)
            signal = here().largest(int(stop.by or 0))  # also one behind the last update, to any of them
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


def steps_in(checkpoint: Path) -> int:
    """How many steps a file of a training has behind it."""
    return int(read_archive(checkpoint).documents["agent"]["progress"]["num_timesteps"])


def _take_up(beside: Mapping[str, Stateful], cut_off: Path) -> None:
    before = read_archive(cut_off).documents[BESIDE]
    for name, each in beside.items():
        each.take_up(before[name])


def _leave(signal: Signals, run: RunFolder) -> None:
    deafen()
    if not here().writes:
        sys.exit(RESUMABLE)
    leave(f"stopped by {signal.name}; go on with: rlxf resume {run.path}", RESUMABLE)
