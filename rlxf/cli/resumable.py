"""Trainings that are saved periodically, stop at resumable points, and are completed in stages."""

import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from signal import Signals
from typing import Any, Self, TypeVar, get_type_hints

import torch

from rlxf import __version__
from rlxf.agents.acting_memory import CACHE_COPIES, state_memory
from rlxf.attention import TransformerSpec
from rlxf.cli.keeping import keep
from rlxf.cli.learner import Learner
from rlxf.cli.mistakes import leave
from rlxf.cli.offline_learner import WindowOptions
from rlxf.cli.task import trust_option
from rlxf.cli.together import deafen
from rlxf.training import Checkpoints, RunFolder, read_archive, stop_on_signals
from rlxf.training.checkpoints import BESIDE, Stateful
from rlxf.training.contents import CONFIG
from rlxf.training.described import described
from rlxf.training.field_rules import rule_of
from rlxf.training.joining import here
from rlxf.training.log_files import LogPosition
from rlxf.training.stopping import RESUMABLE, Stop, Stopped, handled, raise_stopped
from rlxf.utils.memory_budget import MemoryBudgetError, check_budget

LOG = "log"
"""Name of the state of the log files in a checkpoint, next to those of callbacks."""
NUMBER = 4
"""Bytes of a number of float32."""
ENVIRONMENT = 16 * 2**10
"""Bytes of a small environment in its wrappers."""
Options = TypeVar("Options")


@dataclass(frozen=True)
class Start:
    """The point of a run at which its training starts.

    Args:
        file: the checkpoint to resume from; None for the beginning.
        steps: steps or updates before it.
        log: position of the log at that point.
    """

    file: Path | None = None
    steps: int = 0
    log: LogPosition = field(default_factory=LogPosition)

    @classmethod
    def of(cls, run: RunFolder) -> Self:
        """Return the newest whole checkpoint. A run that was killed before its first one starts over.

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
    """Return True if a run of so many steps has its completion marker; the writing process decides."""
    done = here().writes and run.completion is not None and run.completion.steps >= total
    return bool(here().largest(int(done)))


def describe_completion(run: RunFolder, unit: str, hint: str = "") -> str:
    """Return the message for a complete run, with the names of files that were changed since.

    Args:
        run: has its completion marker, at least in the process that writes.
        unit: "steps" or "updates".
        hint: advice at the end of the message.
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
    """Train to the end, save the agent, run the final stages, and write the completion marker last.

    All stages after the last update depend on its checkpoint alone. If they are interrupted, ``rlxf resume``
    repeats all of them and replaces the files that were written before. After a signal the process leaves
    with status 75.

    Args:
        agent: learns.
        run: where it is saved.
        start: the point to continue from.
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
    """Train to the end, or leave with status 75 after a signal; progress is kept.

    Several processes leave together, once it is kept.

    Args:
        agent: learns.
        run: where it is saved, every so many seconds and at the end.
        learn: the agent's, but for ``callback`` and ``resume_from``.
        callbacks: SB3's.
        beside: those among them that go on with the training, by name.
        every_seconds: from one checkpoint to the next.
        start: the point to continue from.
        stop: reports whether to stop.
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


def check_types(options: type[Any], run: RunFolder) -> None:
    """Raise ValueError if a value in the ``config.json`` of a run is of another type than its option.

    Args:
        options: the dataclass of a command's options, which may have parts that are dataclasses.
        run: the folder.
    """
    for name, annotation in get_type_hints(options).items():
        if annotation is TransformerSpec:  # it checks its own values
            continue
        if is_dataclass(annotation):
            check_types(annotation, run)  # type: ignore[arg-type]  # a class: it is an annotation
            continue
        rule = rule_of(annotation)
        if name in run.config and not rule.holds(run.config[name]):
            raise ValueError(
                f"{run.path / CONFIG} has {name} = {reprlib.repr(run.config[name])}, which must be "
                f"{rule.allowed}; correct it"
            )


def check_memory(run: RunFolder, core: TransformerSpec, learner: Learner | WindowOptions) -> None:
    """Raise ValueError if the ``config.json`` of a run requests more memory than the budget allows.

    The budget is that of `rlxf.utils.memory_budget`; the checkpoints of the run add to it as any file does.
    Memory is estimated from below: a run that has a checkpoint of its own passes.

    Args:
        run: the folder.
        core: the requested core.
        learner: the requested options.
    """
    files = [*run.checkpoints.files(), run.checkpoint]
    brought = max((file.stat().st_size for file in files if file.is_file()), default=0)
    try:
        asked = _online_bytes(core, learner) if isinstance(learner, Learner) else _window_bytes(core, learner)
        least = NUMBER * core.kinds * core.width * (core.width + core.inner_width)
        check_budget({_told_sizes(core): least, **asked}, brought)
        with torch.device("meta"):
            module = core.build()
        weights = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        check_budget({_told_sizes(core): weights, **asked}, brought)
    except (MemoryBudgetError, RuntimeError, OverflowError) as error:  # torch counts up to 2^63
        raise ValueError(f"{run.path / CONFIG} asks for too much memory: {error}") from error


def _told_sizes(core: TransformerSpec) -> str:
    return f"weights of core.width {core.width}, core.layers {core.layers}"


def _online_bytes(core: TransformerSpec, learner: Learner) -> dict[str, int]:
    """Return the memory of environments, their recurrent states, and the steps of a rollout."""
    remembered = state_memory(core) // CACHE_COPIES
    steps = (learner.n_steps or learner.segment_length) * core.layers * core.width * NUMBER
    sizes = f"n_envs {learner.n_envs}, n_steps {learner.n_steps}, segment_length {learner.segment_length}"
    return {
        f"environments and steps of {sizes}": learner.n_envs * (ENVIRONMENT + steps),
        f"the core.memory of n_envs {learner.n_envs}": learner.n_envs * remembered,
    }


def _window_bytes(core: TransformerSpec, learner: WindowOptions) -> dict[str, int]:
    """Return the memory of a batch's tokens, three for each step, and of the time-step embeddings."""
    tokens = 3 * learner.context_length * learner.batch_size
    return {
        f"windows of batch_size {learner.batch_size}, context_length {learner.context_length}": tokens
        * core.width
        * NUMBER,
        f"episode_length {learner.episode_length}": (learner.episode_length or 0) * core.width * NUMBER,
    }


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
