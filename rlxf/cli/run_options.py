"""Options of a run in its ``config.json``: conversion, and checks of their types and of the needed memory."""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import torch

from rlxf.attention import TransformerSpec
from rlxf.training import RunFolder
from rlxf.training.json_rules import rule_of
from rlxf.utils.memory_budget import MemoryBudgetError, check_budget
from rlxf.utils.run_files import CONFIG

NOT_SAVED = ("run", "config", "tuned", "trust", "progress_bar", "quiet", "download")
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
            config |= {name: to_json(each) for name, each in asdict(value).items()}  # type: ignore[arg-type]
        elif field.name not in NOT_SAVED:
            config[field.name] = to_json(value)
    return config


def to_json(value: Any) -> Any:
    """Return the value of an option as in ``config.json``: lists for tuples, and texts for paths."""
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
    options = {name: _from_json(hint, name, config) for name, hint in _saved_options(kind).items()}
    return kind(**options | given)


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


def check_config_types(kind: Any, config: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError if a value in the ``config.json`` of a run does not have the type of its option.

    Args:
        kind: dataclass of a command, whose fields may be dataclasses of options.
        config: content of the file.
        file: path of the file, for the message.
    """
    for name, hint in _saved_options(kind).items():
        if hint is TransformerSpec:  # from_dict checks its values
            continue
        if is_dataclass(hint):
            check_config_types(hint, config, file)
            continue
        rule = rule_of(hint)
        if name in config and not rule.holds(config[name]):
            raise ValueError(
                f"{file} has {name} = {reprlib.repr(config[name])}, which must be {rule.allowed}; correct it"
            )


def check_config_budget(run: RunFolder, usage: dict[str, int]) -> None:
    """Raise ValueError if the ``config.json`` of a run needs more memory than the budget allows.

    Args:
        run: folder of the run.
        usage: lower bounds of the memory in bytes that a training run needs, by description.
    """
    try:
        check_budget(usage, _checkpoint_bytes(run))
    except MemoryBudgetError as error:
        raise ValueError(f"{run.path / CONFIG} needs too much memory: {error}") from error


def _checkpoint_bytes(run: RunFolder) -> int:
    """Return the size of the largest checkpoint of a run; 0 if it has none."""
    files = [*run.resume_checkpoints.files(), run.final_checkpoint]
    return max((file.stat().st_size for file in files if file.is_file()), default=0)


def check_core_memory(
    run: RunFolder, core: TransformerSpec, memory_usage: Callable[[TransformerSpec], dict[str, int]]
) -> None:
    """Raise ValueError if the ``config.json`` of a run with a core needs more memory than the budget allows.

    The budget is that of `rlxf.utils.memory_budget`; the size of the checkpoints increases it. The estimate
    is a lower bound, so that every run with a checkpoint of its own passes.

    Args:
        run: folder of the run.
        core: core in the configuration.
        memory_usage: function that returns a lower bound of the memory in bytes that a training run with
            this core needs, by description.
    """
    file_size = _checkpoint_bytes(run)
    sizes = f"weights of core.width {core.width}, core.layers {core.layers}"
    try:
        usage = memory_usage(core)
        least = FLOAT32_BYTES * core.distinct_layers * core.width * (core.width + core.inner_width)
        check_budget({sizes: least, **usage}, file_size)
        with torch.device("meta"):
            module = core.build()
        weights = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        check_budget({sizes: weights, **usage}, file_size)
    except (MemoryBudgetError, RuntimeError, OverflowError) as error:  # sizes of torch are below 2^63
        raise ValueError(f"{run.path / CONFIG} needs too much memory: {error}") from error
