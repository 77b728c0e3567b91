"""Commands on the model card of a run: the one that trained its agent, and options that its users need."""

import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import gymnasium

from rlxf.cli.commands import COMMANDS
from rlxf.cli.config_file import run_settings, to_arguments
from rlxf.cli.entry_point import parse
from rlxf.cli.env_options import trust_option
from rlxf.cli.run_options import check_config_types, options_to_config
from rlxf.cli.runs import TRAINING_COMMANDS
from rlxf.training import RunFolder
from rlxf.training.strict_json import dump_json, load_json
from rlxf.utils.names import short_repr
from rlxf.utils.run_files import CONFIG, PROGRAM, TEACHER

REQUIRED_OPTIONS = ("env", "dataset")
"""Options without a default, of commands that train."""
DISTILLATION = ("steps", "temperature", "hidden_coef", "actor", "seed", "device")
"""Options of ``rlxf distill`` in the ``config.json`` of a student."""


def trust_of(run: RunFolder) -> str:
    """Return `` --trust`` if commands on a run need it; else, or if a package is missing, an empty string."""
    try:
        return trust_option(run.config)
    except gymnasium.error.Error:
        return ""


def training_command_line(run: RunFolder) -> str | None:
    """Return the command that trains an agent as in a run, without options that have their default.

    Options of techniques that were added since have their default. The command is None if the run is not one
    of ``rlxf train`` or ``rlxf distill``, or was written by another version.
    """
    words = TRAINING_COMMANDS.get(run.config["agent"])
    if words is None or PROGRAM in run.config:
        return None
    try:
        first, arguments = _distillation(run) if TEACHER in run.config else ([words], _arguments(run, words))
    except (ValueError, TypeError, KeyError):
        return None
    lines = [shlex.join(option) for option in _by_option(arguments)]
    return " \\\n    ".join([" ".join(["rlxf", *first]), *lines])


def teacher_of(run: RunFolder) -> str | None:
    """Return the folder of the teacher of a student, without the parents of an absolute path.

    It is None if the agent was not distilled, or the folder is not a printable text.
    """
    teacher = run.config.get(TEACHER)
    if not isinstance(teacher, str) or not teacher.isprintable():
        return None
    return Path(teacher).name if Path(teacher).is_absolute() else teacher


def _distillation(run: RunFolder) -> tuple[list[str], list[str]]:
    """Return the words of the command that distilled a student, and its options.

    The sizes of the student are among them, since their defaults depend on the teacher.
    """
    command, teacher = resolve_name(COMMANDS["distill"]), teacher_of(run)
    if teacher is None or teacher.startswith("-"):
        raise ValueError(f"the teacher must be a folder, got {short_repr(run.config[TEACHER])}")
    sizes = {name: run.config["core"][name] for name in ("width", "layers", "heads")}
    settings = {field.name: run.config[field.name] for field in fields(command) if field.name in DISTILLATION}
    check_config_types(command, settings | sizes, run.path / CONFIG)
    defaults = {field.name: field.default for field in fields(command)}
    changed = {name: value for name, value in settings.items() if value != defaults[name]}
    trust = ["--trust"] if trust_of(run) else []
    return ["distill", shlex.quote(teacher)], [*to_arguments(changed | sizes), *trust]


def _arguments(run: RunFolder, words: str) -> list[str]:
    full = _settings_arguments(run, words)
    names = [f"--{name}" for name in REQUIRED_OPTIONS]
    required = [option for option in _by_option(full) if option[0] in names and option[1:] != ["None"]]
    default = RunFolder(run.path, _parsed_config(run, words, _joined(required)))
    defaults = _by_option(_settings_arguments(default, words))
    short = _joined([option for option in _by_option(full) if option in required or option not in defaults])
    parsed = RunFolder(run.path, _parsed_config(run, words, short))
    return short if _settings_arguments(parsed, words) == full else full


def _parsed_config(run: RunFolder, words: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the ``config.json`` that a command with these arguments would write."""
    config = {"agent": run.config["agent"]} | options_to_config(parse([*words.split(), *arguments]))
    return dict(load_json(dump_json(config)))


def _settings_arguments(run: RunFolder, words: str) -> list[str]:
    command = resolve_name(COMMANDS[words])
    return to_arguments(run_settings(run, run.path / CONFIG, command, ["--trust"]))


def _by_option(arguments: Sequence[str]) -> list[list[str]]:
    """Return the words of the command line, grouped by option."""
    groups: list[list[str]] = []
    for word in arguments:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    return groups


def _joined(groups: Sequence[Sequence[str]]) -> list[str]:
    return [word for group in groups for word in group]
