"""Options of the runs that other commands start: checks before their processes start."""

import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from rlxf.utils.framed_errors import one_line_error

if TYPE_CHECKING:
    from rlxf.experiments.jobs import Job, Outcome
    from rlxf.training import RunFolder


UNKNOWN = re.compile(r"unknown option --(?P<name>[\w.-]+)")
"""Pattern of the start of a message about an option that a command does not have."""
ONE_OPTION = re.compile(
    r"unknown |Invalid choice |Unrecognized options |a schedule is |Error parsing --|--arguments of "
    r"|--[\w.-]+ is empty: "
    r"|(Error parsing [\w.-]+: )?[\w .-]+ must be (finite|one of|in \[|above 0|at least [01],|at least [01]$"
    r"|True or False|a (finite |whole )?number|a tuple|a JSON object|a technique of rlxf)(?!.*; use)"
)
"""Pattern of the start of a message that is the same for any values of the other options."""
PATH_OPTIONS = ("config", "pretrained")
"""Options of training commands that are the path of a file or folder."""
RESOLVED = ("policy", "return_scale", "episode_length", "target_returns")
"""Options of which a run may store other values: those of its agent, or of its data."""
ADVICE = "move the folder, or choose another one with --output"
"""Advice in messages about a run with other options."""
TASK_OPTIONS = ("env_kwargs", "curriculum", "dataset", "trust_data")
"""Options that define the task of a run, next to the environment; they are compared even if they are None."""


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """Return the options in the words of a command as in the ``config.json`` of its run.

    Settings that ``--tuned`` or ``--config`` names are included.

    Raises:
        ValueError: if the command line refuses the words, or `Command.check` the options, with the message
            of the command line; or if the core has a technique that the process of a run does not know.
    """
    from rlxf.cli.entry_point import parse
    from rlxf.cli.run_options import options_to_config

    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            command = parse(words)
            command.check()
            config = options_to_config(command)
    except SystemExit:
        raise ValueError(one_line_error(printed.getvalue())) from None
    except TypeError as error:
        raise ValueError(str(error)) from error
    _check_techniques(config.get("core") or {})
    return config


def read_settings(command: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a command with the settings of a file, see `read_options`.

    Args:
        command: words of the command, e.g. "train dt", or "baseline ppo".
        settings: its options, as in `to_arguments`.

    Raises:
        ValueError: as `read_options`, and a `SettingsError` if a value has a wrong type or is not finite.
    """
    from rlxf.cli.commands import COMMANDS
    from rlxf.cli.config_file import flat_options, to_arguments
    from rlxf.cli.config_values import check_values
    from rlxf.cli.entry_point import command_words

    words = [*command.split(), *to_arguments(settings)]
    check_values(flat_options(settings), resolve_name(COMMANDS[command_words(words) or ""]))
    return read_options(words)


def _check_techniques(core: Mapping[str, Any]) -> None:
    """Raise ValueError if a core has a technique of another package, which the processes of runs lack.

    Args:
        core: result of `TransformerSpec.to_dict`.
    """
    from rlxf.attention.registry import TECHNIQUES, techniques_of

    for axis in core.keys() & TECHNIQUES.keys():
        for name in _names_in(core[axis]):
            module = techniques_of(axis)[name].__module__
            if module.partition(".")[0] != "rlxf":
                raise ValueError(
                    f"--core.{axis} must be a technique of rlxf, got {name} of {module}: each run is a "
                    f"process of rlxf, which does not import {module}. Train such runs one by one with a "
                    f"program that imports it, and compare them with rlxf compare"
                )


def _names_in(technique: Any) -> Iterator[str]:
    """Yield the name of a technique in JSON, and those of the techniques that it combines."""
    if isinstance(technique, dict):
        yield technique["name"]
        for option in technique.values():
            yield from _names_in(option)
    elif isinstance(technique, list | tuple):
        for each in technique:
            yield from _names_in(each)


def named_option(error: Exception, names: Iterable[str]) -> str | None:
    """Return the option of a file that an error is about, or the entry of a table; None if none is found.

    Args:
        error: error of `read_options`, or of the conversion of the options into words.
        names: full names of the options in the file, with those of entries of tables.
    """
    from rlxf.cli.config_values import CHOICES, SettingsError

    if isinstance(error, SettingsError):
        return error.name
    message = str(error)
    options = {*names, *(name.partition(".")[0] for name in names)}
    option = _earliest(message, {name: _option_pattern(name) for name in options})
    option = option or _earliest(message, {name: rf"\b{name}\b" for name in options & {*CHOICES}})
    start = f"{option}."
    entries = {name: _entry_pattern(name.removeprefix(start)) for name in names if name.startswith(start)}
    return _earliest(message, entries) or option


def unknown_option(error: Exception) -> str | None:
    """Return the name of the option that a command does not have, as in a file; None for another error."""
    match = UNKNOWN.match(str(error))
    return match["name"].replace("-", "_") if match else None


def is_about_one_option(error: Exception) -> bool:
    """Return whether an error of `read_options` is the same for any values of the other options.

    It is if an option is unknown, a technique has no such name, or a value has another type or is below a
    fixed bound.
    """
    from rlxf.cli.config_values import SettingsError

    return isinstance(error, SettingsError) or bool(ONE_OPTION.match(str(error)))


def _earliest(message: str, patterns: Mapping[str, str]) -> str | None:
    """Return the name whose pattern is found first in a message."""
    matches = ((re.search(pattern, message), name) for name, pattern in patterns.items())
    return min(((match.start(), name) for match, name in matches if match), default=(0, None))[1]


def _option_pattern(name: str) -> str:
    """Return the pattern of an option on the command line, or of its negation."""
    group, dot, last = name.replace("_", "-").rpartition(".")
    return rf"--{re.escape(group + dot)}(no-)?{re.escape(last)}(?![\w-]|\.\w)"


def _entry_pattern(name: str) -> str:
    """Return the pattern of the places of a message that name an entry of a table, not of its other words."""
    entry = re.escape(name)
    named = rf"(\bargument |\bfor |['\"`]){entry}(?![\w-])"
    return rf"{named}|(?<![\w.-]){entry}(?= in --| must be )"


def with_absolute_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which the paths of files and folders are absolute."""
    return {name: _absolute(value) if name in PATH_OPTIONS else value for name, value in options.items()}


def _absolute(value: Any) -> Any:
    is_path = isinstance(value, str) and value != "None"
    return str(Path(value).absolute()) if is_path else value


def needs_trust(options: Mapping[str, Any]) -> bool:
    """Return whether a run with these options, see `read_options`, can be resumed with trust only."""
    names = ("env_kwargs", "curriculum", "trust_data", "workers", "pretrained")
    return ":" in str(options.get("env", "")) or any(map(options.get, names))


def make_job(
    folder: Path, command: str, settings: Mapping[str, Any], options: Mapping[str, Any], threads: int
) -> "Job":
    """Return a run of a command.

    Args:
        folder: folder of the run.
        command: words of the command.
        settings: its options with the seed, as in `to_arguments`.
        options: all options, see `read_settings`.
        threads: threads of the process.
    """
    from rlxf.cli.config_file import to_arguments
    from rlxf.experiments.jobs import Job
    from rlxf.training.strict_json import dump_json

    words, written = tuple(to_arguments(settings)), dump_json(options).decode()
    return Job(str(folder), command, words, needs_trust(options), threads, written)


def check_same(job: "Job", options: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError if the folder of a run exists and was made with other options, or with unknown ones.

    Args:
        job: the run.
        options: options of its command, see `read_options`.
        file: file that describes the runs.
    """
    from rlxf.experiments.jobs import Outcome
    from rlxf.training.run_folder import RunFolder
    from rlxf.utils.run_files import CONFIG

    folder = Path(job.folder)
    if not folder.exists():  # also after a failure before the first update
        return
    outcome = Outcome.read(job)
    if outcome is not None:
        _check_command(outcome, job, file)
    elif not folder.is_dir() or any(folder.iterdir()):
        raise ValueError(
            f"{folder} was not made by {file}, or its record {job.sibling('json')} is missing, so its "
            f"options are unknown: {ADVICE}"
        )
    if (folder / CONFIG).is_file():
        _check_options(RunFolder.reopen(folder), options, file)


def _check_command(outcome: "Outcome", job: "Job", file: Path) -> None:
    """Raise ValueError if the last attempt of a run had other words than the next one, or other options.

    Options of a file that the words name may change although the words are the same.
    """
    trained, given = _options(outcome.command), _options([job.command, *job.arguments])
    for name in {**trained, **given}:
        if trained.get(name) != given.get(name):
            raise ValueError(
                f"{job.folder} was trained with {_shown(name, trained)}, but {file} has "
                f"{_shown(name, given)}: {ADVICE}"
            )
    before, now = (with_absolute_paths(json.loads(text)) for text in (outcome.options, job.options))
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            raise ValueError(
                f"{job.folder} was trained with {name} = {before[name]!r}, but the options of {file}, with "
                f"those of files that it names, now have {now[name]!r}: {ADVICE}"
            )


def _check_options(run: "RunFolder", options: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError if a run has other options in its ``config.json``, e.g. after it was trained longer.

    Options that are None here have a default that depends on the agent or its data. The environment of a run
    on datasets is that of its datasets, or of ``--env``; an id with a module, which would be imported, must
    be that of ``--env``.
    """
    env = run.config.get("env")
    of_data = "dataset" in options and options.get("env") is None and ":" not in str(env)
    given = with_absolute_paths(json.loads(json.dumps(options)))
    config = with_absolute_paths(run.config)
    others = {name for name, value in given.items() if value is not None and name in run.config}
    others -= {"env", "seed", *RESOLVED}  # the seed is among the words of the command
    for name in sorted(others | {*TASK_OPTIONS} | (set() if of_data else {"env"})):
        if (config.get(name) or {}) != (given.get(name) or {}):
            raise ValueError(
                f"{run.path} has {name} = {run.config.get(name)!r} in its config.json, but {file} has "
                f"{options.get(name)!r}: {ADVICE}"
            )


def _options(words: Sequence[str]) -> dict[str, list[str]]:
    """Return name -> values of the options in the words of a command, with absolute paths.

    The command has the name "".
    """
    values: list[str] = []
    options = {"": values}
    for word in words:
        if word.startswith("--"):
            values = options[word] = []
        else:
            values.append(word)
    paths = {f"--{name}" for name in PATH_OPTIONS} & options.keys()
    return options | {name: [_absolute(each) for each in options[name]] for name in paths}


def _shown(name: str, options: Mapping[str, list[str]]) -> str:
    """Return an option as on the command line, or the command."""
    return " ".join([name or "rlxf", *options[name]]) if name in options else f"no {name}"
