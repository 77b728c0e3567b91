"""Options of a training run in the ``config.json`` of its run: writing, reading and checks."""

import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args, get_type_hints

import torch

from rlxf import __version__
from rlxf.attention import TransformerSpec
from rlxf.training import RunFolder
from rlxf.training.compat import CONFIG, rule_of
from rlxf.utils.memory_budget import MemoryBudgetError, check_budget

NOT_SAVED = ("run", "progress_bar", "quiet", "download")
"""Options of a command that do not affect the results of its run."""
FLOAT32_BYTES = 4
Options = TypeVar("Options")


def options_to_config(options: Any) -> dict[str, Any]:
    """Return the options of a command as JSON values; those of nested dataclasses are at the top level."""
    config: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, TransformerSpec):
            config[field.name] = value.to_dict()
        elif is_dataclass(value):
            config |= asdict(value)  # type: ignore[arg-type]  # an instance, not a class
        elif field.name not in NOT_SAVED:
            config[field.name] = _to_json(value)
    return config


def _to_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def options_from_config(kind: type[Options], config: Mapping[str, Any], **given: Any) -> Options:
    """Return the options of a command with the values of a ``config.json``.

    Args:
        kind: dataclass of the options.
        config: content of the file.
        given: options that are not read from the file.

    Raises:
        KeyError: if an option is missing.
    """
    values = {
        name: _from_json(hint, name, config)
        for name, hint in _saved_options(kind).items()
        if name not in given
    }
    return kind(**values | given)


def _from_json(hint: Any, name: str, config: Mapping[str, Any]) -> Any:
    if hint is TransformerSpec:
        return TransformerSpec.from_dict(config[name])
    if is_dataclass(hint):
        return options_from_config(hint, config)  # type: ignore[arg-type]  # a class, not an instance
    value = config[name]
    if isinstance(value, list):
        return tuple(value)
    return Path(value) if isinstance(value, str) and Path in get_args(hint) else value


def _saved_options(kind: Any) -> dict[str, Any]:
    """Return name -> type of the fields of a dataclass, without `NOT_SAVED`."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.name not in NOT_SAVED}


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


def check_types(kind: Any, run: RunFolder) -> None:
    """Raise ValueError if a value in the ``config.json`` of a run does not have the type of its option.

    Args:
        kind: dataclass of a command, whose fields may be dataclasses of options.
        run: folder of the run.
    """
    for name, hint in _saved_options(kind).items():
        if hint is TransformerSpec:  # from_dict checks its values
            continue
        if is_dataclass(hint):
            check_types(hint, run)
            continue
        rule = rule_of(hint)
        if name in run.config and not rule.holds(run.config[name]):
            raise ValueError(
                f"{run.path / CONFIG} has {name} = {reprlib.repr(run.config[name])}, which must be "
                f"{rule.allowed}; correct it"
            )


class Learner(Protocol):
    """Options of a training algorithm."""

    def memory_usage(self, core: TransformerSpec) -> dict[str, int]:
        """Return a lower bound of the memory in bytes that a training run needs, by description."""
        ...


def check_memory(run: RunFolder, core: TransformerSpec, learner: Learner) -> None:
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
    sizes = f"weights of core.width {core.width}, core.layers {core.layers}"
    try:
        usage = learner.memory_usage(core)
        least = FLOAT32_BYTES * core.kinds * core.width * (core.width + core.inner_width)
        check_budget({sizes: least, **usage}, file_size)
        with torch.device("meta"):
            module = core.build()
        weights = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        check_budget({sizes: weights, **usage}, file_size)
    except (MemoryBudgetError, RuntimeError, OverflowError) as error:  # sizes of torch are below 2^63
        raise ValueError(f"{run.path / CONFIG} needs too much memory: {error}") from error
