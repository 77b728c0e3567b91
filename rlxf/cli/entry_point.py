"""The `rlxf` program: parsing, suggestions for unknown options, and the start of a command."""

import inspect
import io
import re
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from operator import or_
from pathlib import Path
from pkgutil import resolve_name
from shutil import get_terminal_size
from textwrap import fill, indent
from typing import Annotated, Any, NoReturn

import tyro
from tyro.conf import HelptextFromCommentsOff, Suppress, subcommand

from rlxf import __version__
from rlxf.cli.commands import COMMANDS, SUMMARIES
from rlxf.cli.options import GIVEN_WORDS, Command, NotACountError, given_lists, given_options
from rlxf.cli.output import (
    EXECUTION_ERRORS,
    PREPARATION_ERRORS,
    exit_in_one_line,
    exit_with,
    print_out,
    replace_unprintable_characters,
    report_errors,
)
from rlxf.tuned import tuned_file
from rlxf.utils.files import not_writable_by_others
from rlxf.utils.names import did_you_mean, similar_name

DESCRIPTION = (
    f"rlxf {__version__}: transformer agents for reinforcement learning. --version prints the version."
)
BASELINE_COMMANDS = {f"train {name}": f"baseline {name}" for name in ("ppo", "recurrent-ppo")}
"""Words that look like a command -> the command that trains this agent."""
EXAMPLE = "Example: rlxf train gtrxl --help"
HELP = {"-h", "--help"}
OPTION = re.compile(r"(?:│|\s) (?:-h, )?(--[a-z][\w.-]*)(?:, (--[a-z][\w.-]*))?")
"""Pattern of option names in a help text of tyro, with or without frames."""


def main(args: Sequence[str] | None = None) -> None:
    """Run a command.

    The exit status is 0 after success, and 2 with a one-line message after an error that the user can fix.
    It is 75 if a signal stopped a training run that can be resumed. Otherwise it is 130 after Ctrl-C, 143
    after SIGTERM and 138 after SIGUSR1; temporary files are removed. It is 141 without a message if the
    standard output is a closed pipe.

    Args:
        args: arguments of the command line; None for ``sys.argv[1:]``.
    """
    replace_unprintable_characters()
    with exit_in_one_line(), not_writable_by_others():
        with report_errors(*PREPARATION_ERRORS):
            GIVEN_WORDS.set(tuple(sys.argv[1:] if args is None else args))
            work = parse(args).prepare()
        with report_errors(*EXECUTION_ERRORS):
            work()


def parse(args: Sequence[str] | None = None) -> Command:
    """Return the command with its options; None for ``args`` means ``sys.argv[1:]``.

    Raises:
        SystemExit: with status 0 after a help text or the version, with 2 if the arguments are invalid.
    """
    args = sys.argv[1:] if args is None else list(args)
    if args == ["--version"]:
        print_out(f"rlxf {__version__}")
        sys.exit(0)
    words = command_words(args)
    if words is None:
        _show_overview(args)
    return _parse_options(words, args[len(words.split()) :])


def command_words(args: Sequence[str]) -> str | None:
    """Return the key of `COMMANDS` with which arguments begin, e.g. "train dt"; None without one."""
    return next((words for words in COMMANDS if [*args[: len(words.split())]] == words.split()), None)


def _parse_options(words: str, args: list[str]) -> Command:
    """Parse the arguments after the words of a command, e.g. "train dt".

    Unknown options and invalid counts are reported in one line.
    """
    command: type[Command] = resolve_name(COMMANDS[words])
    with report_errors(*PREPARATION_ERRORS):
        settings = _settings_arguments(words, command, args)
    args = [*settings, *args]
    read = partial(
        tyro.cli,
        command,
        prog=f"rlxf {words}",
        description=_wrapped_description(command),
        default=command.defaults(args),
        registry=command.registry(args),
        config=(HelptextFromCommentsOff,),  # help texts are docstrings
    )
    if not HELP.intersection(args):
        return _read_or_refuse(read, args, f"rlxf {words} --help")
    if settings:
        requires_data = "dataset" in _field_names(command)
        read = partial(read, default=_chosen_options(read, args, requires_data))
    return read(args=args)


def _read_or_refuse(read: Callable[..., Command], args: Sequence[str], help_command: str) -> Command:
    """Return the command with its options; exit with one line if an option is unknown or a count invalid.

    The names of the options are computed after an error only, because that takes as long as parsing.
    """
    try:
        with redirect_stderr(io.StringIO()) as shown:
            command = read(args=args)
    except (SystemExit, NotACountError, *PREPARATION_ERRORS):
        _refuse_unknown_options(args, _option_names(read), help_command)
    else:
        sys.stderr.write(shown.getvalue())
        return command
    try:
        return read(args=args)  # the same error, printed in the format of the terminal
    except NotACountError as error:
        exit_with(error.message(args), 2)


def _settings_arguments(words: str, command: type[Command], args: Sequence[str]) -> list[str]:
    """Return the words for the settings file that ``--config`` or ``--tuned`` names; none without them.

    Raises:
        ValueError: if both are given, ``--tuned`` and published settings (``--settings``) are, or the name is
            empty or invalid. The message about an invalid one begins with the option.
    """
    given = given_options(args, *_field_names(command) & {"config", "tuned"})
    given = {name: value for name, value in given.items() if value != "None"}  # the default
    if not given:
        return []
    for name, value in given.items():
        if not value:
            raise ValueError(f"--{name} is empty: name the settings, or leave it out")
    if len(given) > 1:
        raise ValueError("--config and --tuned both name settings: use one of them")
    if "tuned" in given and command.replaced_options(args):
        raise ValueError("--tuned and --settings both name settings of the agent: use one of them")
    from rlxf.cli.config_file import file_arguments

    ((option, value),) = given.items()
    try:
        file = tuned_file(value, words) if option == "tuned" else Path(value)
        return file_arguments(file, words, command, args)  # type: ignore[arg-type]  # it trains
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"--{option}: {error}") from error


def _field_names(command: type[Command]) -> set[str]:
    """Return the names of the options of a command without those of its groups."""
    return {field.name for field in fields(command)}  # type: ignore[arg-type]  # commands are dataclasses


def _chosen_options(read: Callable[..., Any], args: Sequence[str], requires_data: bool) -> Any:
    """Return the options in ``args`` as defaults of a help text; datasets that are not given stay required.

    The defaults of the command are returned if another option is missing or an option is invalid.

    Args:
        read: ``tyro.cli`` with all parameters of the command except ``args``.
        args: words of the command line after the command.
        requires_data: the command has a required option ``--dataset``.
    """
    chosen = read.keywords["default"]  # type: ignore[attr-defined]  # a partial
    words = [word for word in args if word not in HELP]
    lacks_data = requires_data and not given_lists(words, "dataset")
    placeholder = ["--dataset", "ID"] if lacks_data else []
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), suppress(SystemExit, NotACountError):
        chosen = read(args=[*words, *placeholder])
        chosen = replace(chosen, dataset=tyro.MISSING) if lacks_data else chosen
    return chosen


def _wrapped_description(command: type) -> str:
    """Return the docstring of a command, wrapped to the width of the terminal.

    Lines are indented, because tyro joins other lines again. The example can be copied: it is one line.
    """
    width = get_terminal_size().columns
    paragraphs = [" ".join(paragraph.split()) for paragraph in (inspect.getdoc(command) or "").split("\n\n")]
    return "\n\n".join(
        indent(each if each.startswith("Example:") else fill(each, width - 1, break_on_hyphens=False), " ")
        for each in paragraphs
    )


def _option_names(read: Callable[..., Any]) -> set[str]:
    """Return the names of all options of a command, as its help text shows them.

    Args:
        read: ``tyro.cli`` with all parameters of the command except ``args``.
    """
    with redirect_stdout(io.StringIO()) as shown, suppress(SystemExit):
        read(args=["--help"])
    return {name for names in OPTION.findall(shown.getvalue()) for name in names if name}


def _refuse_unknown_options(args: Sequence[str], known: Collection[str], help_command: str) -> None:
    """Exit with status 2 and one line if an option is unknown; ``_`` and ``-`` in names are equivalent.

    Args:
        args: words of the command line after the command.
        known: names of the options of the command.
        help_command: command that prints its help text.
    """
    for word in args:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and len(name) > 2 and name not in known:
            names = [each for each in known if not each.startswith("--no-") or name.startswith("--no")]
            exit_with(f"unknown option {name}{did_you_mean(name, names, f'see: {help_command}')}", 2)


def _show_overview(args: list[str]) -> NoReturn:
    """Print all commands, or those of the group that is the first word, and exit."""
    group = args[0] if args and args[0] in SUMMARIES else ""
    rest = args[1:] if group else args
    start = f"{group} " if group else ""
    words = dict.fromkeys(
        words.removeprefix(start).split()[0] for words in COMMANDS if words.startswith(start)
    )
    if rest and not rest[0].startswith("-"):
        near = similar_name(rest[0], words)
        hint = f"did you mean {start}{near}?" if near else f"available commands: {', '.join(words)}"
        if other := BASELINE_COMMANDS.get(start + rest[0]):
            hint = f"did you mean {other}?"
        exit_with(f"unknown command {start}{rest[0]}; {hint}", 2)
    placeholders = [
        Annotated[_Placeholder, subcommand(word, description=SUMMARIES[start + word])] for word in words
    ]
    # The hidden second member makes a union, so that tyro requires the word even if there is only one.
    choices: Any = reduce(or_, [*placeholders, Annotated[None, Suppress]])
    description = f"{SUMMARIES.get(group, DESCRIPTION)}\n\n{EXAMPLE}"
    tyro.cli(choices, prog=f"rlxf {group}".strip(), description=description, args=rest)
    raise AssertionError(f"tyro parsed {args} as a command, but no command has these words")


@dataclass(frozen=True)
class _Placeholder:
    """Placeholder of a command in an overview, which avoids the import of the command."""
