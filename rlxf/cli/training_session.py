"""Training runs with periodic checkpoints, which can be interrupted and resumed."""

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
from rlxf.agents.common.checkpoint import CACHE_COPIES, state_memory
from rlxf.attention import TransformerSpec
from rlxf.cli.error_reporting import exit_with
from rlxf.cli.finalize_run import save_agent
from rlxf.cli.options.env_options import trust_option
from rlxf.cli.options.offline_options import WindowOptions
from rlxf.cli.options.ppo_options import PPOOptions
from rlxf.cli.torchrun_job import ignore_signals
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
from rlxf.training.compat import CONFIG, checkpoint_errors, rule_of
from rlxf.training.distributed import process_group
from rlxf.training.resumed_logger import LogPosition
from rlxf.utils.memory_budget import MemoryBudgetError, check_budget

LOG = "log"
"""Name of the state of the log files in a checkpoint, next to the states of callbacks."""
NUMBER = 4
"""Size of a float32 in bytes."""
ENVIRONMENT = 16 * 2**10
"""Estimated memory of a small environment with its wrappers, in bytes."""
Options = TypeVar("Options")


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
    done = process_group().writes and run.completion is not None and run.completion.steps >= total
    return bool(process_group().all_reduce_max(int(done)))


def describe_completion(run: RunFolder, unit: str, hint: str = "") -> str:
    """Return the message for a complete run, with the names of files that changed afterwards.

    Args:
        run: run with a completion marker, at least in the writing process.
        unit: "steps" or "updates".
        hint: advice at the end of the message.
    """
    if run.completion is None:
        return ""
    changed = ", ".join(run.completion.changed(run.path))
    since = f" ({changed} changed afterwards)" if changed else ""
    return f"{run.path} is complete: {run.completion.steps} {unit}{since}{hint}"


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
            if process_group().writes:
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

    Several processes exit together after the progress is saved.

    Args:
        agent: agent to train.
        run: folder of the run.
        learn: ``agent.learn`` with all arguments except ``callback`` and ``resume_from``.
        callbacks: callbacks of SB3.
        stateful: callbacks among these whose state is saved in checkpoints, by name.
        every_seconds: seconds between two checkpoints.
        start: point to continue from.
        stop: reports whether to stop.
    """
    saving = CheckpointWriter(run.checkpoints, every_seconds, {**stateful, LOG: run.log_files}, stop)
    if start.file is not None:
        _load_states(stateful, start.file)
    try:
        try:
            learn(callback=[*callbacks, saving], resume_from=start.file)
        finally:
            save_agent(agent, run)
        signal = process_group().all_reduce_max(
            int(stop.signal or 0)
        )  # of all processes, also after the last update
    except ConnectionError:
        ignore_signals()
        raise
    if signal:
        _leave(Signals(signal), run)


@contextmanager
def config_errors(run: RunFolder) -> Iterator[None]:
    """Name the run in errors for options that are missing in its ``config.json``.

    Raises:
        ValueError: replaces the KeyError.
    """
    try:
        yield
    except KeyError as error:
        raise ValueError(
            f"{run.path} cannot be resumed: {error} is missing in its config.json. The file was changed, or "
            f"written by another version of rlxf than {__version__}"
        ) from error


def options_of(kind: type[Options], config: Mapping[str, Any]) -> Options:
    """Return a dataclass of options with the values of a ``config.json``.

    Raises:
        KeyError: if an option is missing.
    """
    return kind(**{each.name: config[each.name] for each in fields(kind)})  # type: ignore[arg-type]


def check_types(options: type[Any], run: RunFolder) -> None:
    """Raise ValueError if a value in the ``config.json`` of a run does not have the type of its option.

    Args:
        options: dataclass of a command, whose fields may be dataclasses of options.
        run: folder of the run.
    """
    for name, annotation in get_type_hints(options).items():
        if annotation is TransformerSpec:  # from_dict checks its values
            continue
        if is_dataclass(annotation):
            check_types(annotation, run)  # type: ignore[arg-type]  # annotations are classes
            continue
        rule = rule_of(annotation)
        if name in run.config and not rule.holds(run.config[name]):
            raise ValueError(
                f"{run.path / CONFIG} has {name} = {reprlib.repr(run.config[name])}, which must be "
                f"{rule.allowed}; correct it"
            )


def check_memory(run: RunFolder, core: TransformerSpec, learner: PPOOptions | WindowOptions) -> None:
    """Raise ValueError if the ``config.json`` of a run needs more memory than the budget allows.

    The budget is that of `rlxf.utils.memory_budget`; the size of the checkpoints increases it. The estimate
    is a lower bound, so that every run with a checkpoint of its own passes.

    Args:
        run: folder of the run.
        core: core in the configuration.
        learner: training options in the configuration.
    """
    files = [*run.checkpoints.files(), run.checkpoint]
    file_size = max((file.stat().st_size for file in files if file.is_file()), default=0)
    try:
        usage = (
            _online_bytes(core, learner) if isinstance(learner, PPOOptions) else _window_bytes(core, learner)
        )
        least = NUMBER * core.kinds * core.width * (core.width + core.inner_width)
        check_budget({_describe_sizes(core): least, **usage}, file_size)
        with torch.device("meta"):
            module = core.build()
        weights = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        check_budget({_describe_sizes(core): weights, **usage}, file_size)
    except (MemoryBudgetError, RuntimeError, OverflowError) as error:  # sizes of torch are below 2^63
        raise ValueError(f"{run.path / CONFIG} needs too much memory: {error}") from error


def _describe_sizes(core: TransformerSpec) -> str:
    return f"weights of core.width {core.width}, core.layers {core.layers}"


def _online_bytes(core: TransformerSpec, learner: PPOOptions) -> dict[str, int]:
    """Return the bytes of environments, their recurrent states, and the rollout, by description."""
    state_bytes = state_memory(core) // CACHE_COPIES
    steps = (learner.n_steps or learner.segment_length) * core.layers * core.width * NUMBER
    sizes = f"n_envs {learner.n_envs}, n_steps {learner.n_steps}, segment_length {learner.segment_length}"
    return {
        f"environments and steps of {sizes}": learner.n_envs * (ENVIRONMENT + steps),
        f"the core.memory of n_envs {learner.n_envs}": learner.n_envs * state_bytes,
    }


def _window_bytes(core: TransformerSpec, learner: WindowOptions) -> dict[str, int]:
    """Return the bytes of a batch's tokens, three per step, and of time-step embeddings, by description."""
    tokens = 3 * learner.context_length * learner.batch_size
    return {
        f"windows of batch_size {learner.batch_size}, context_length {learner.context_length}": tokens
        * core.width
        * NUMBER,
        f"episode_length {learner.episode_length}": (learner.episode_length or 0) * core.width * NUMBER,
    }


def _load_states(stateful: Mapping[str, Stateful], checkpoint: Path) -> None:
    states = read_archive(checkpoint).documents[STATEFUL_DOCUMENT]
    for name, callback in stateful.items():
        callback.load_state(states[name])


def _leave(signal: Signals, run: RunFolder) -> None:
    ignore_signals()
    if not process_group().writes:
        sys.exit(EXIT_RESUMABLE)
    exit_with(
        f"stopped by {signal.name}; resume with: rlxf resume {run.path}{trust_option(run.config)}",
        EXIT_RESUMABLE,
    )
