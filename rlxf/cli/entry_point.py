"""The `rlxf` program: parsing, near names of unknown options, and the start of a command."""

import inspect
import io
import re
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial, reduce
from operator import or_
from pkgutil import resolve_name
from shutil import get_terminal_size
from textwrap import fill, indent
from typing import Annotated, Any, NoReturn

import tyro
from tyro.conf import Suppress, subcommand
from tyro.constructors import ConstructorRegistry

from rlxf import __version__
from rlxf.cli.commands import COMMANDS, SUMMARIES, Command
from rlxf.cli.error_reporting import (
    EXECUTION_ERRORS,
    PREPARATION_ERRORS,
    exit_on_closed_pipe,
    exit_on_signals,
    exit_with,
    print_warnings_once,
    report_errors,
    silence_disk_errors_of_threads,
)
from rlxf.cli.options.common import NotACountError
from rlxf.cli.output import print_out
from rlxf.utils.files import not_writable_by_others

OPTION = re.compile(r"(?:│|\s) (?:-h, )?(--[a-z][\w.-]*)(?:, (--[a-z][\w.-]*))?")
"""Pattern of option names in a help text of tyro, with or without frames."""
NEAR = 0.7
"""Minimum similarity of a proposed name, from 0 to 1, as measured by `difflib`."""


def option_names(read: Callable[..., Any]) -> set[str]:
    """Return the names of all options of a command, as its help text shows them.

    Args:
        read: ``tyro.cli`` with all parameters of the command except ``args``.
    """
    with redirect_stdout(io.StringIO()) as shown, suppress(SystemExit):
        read(args=["--help"])
    return {name for names in OPTION.findall(shown.getvalue()) for name in names if name}


def refuse_unknown_options(args: Sequence[str], known: Collection[str], help_command: str) -> None:
    """Exit with status 2 and one line if an option is unknown; ``_`` and ``-`` in names are equivalent.

    Args:
        args: words of the command line after the command.
        known: names of the options of the command.
        help_command: command that prints its help text.
    """
    for word in args:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and len(name) > 2 and name not in known:
            near = _nearest(name, known)
            exit_with(
                f"unknown option {name}; {f'did you mean {near}?' if near else f'see: {help_command}'}", 2
            )


def refuse_unknown_command(group: str, args: Sequence[str]) -> None:
    """Exit with status 2 and one line if the next word is not a command.

    Args:
        group: the preceding word, e.g. "train"; "" for none.
        args: the remaining words.
    """
    if not args or args[0].startswith("-"):
        return
    start = f"{group} " if group else ""
    known = {words.removeprefix(start).split()[0]: None for words in COMMANDS if words.startswith(start)}
    near = _nearest(args[0], known)
    hint = f"did you mean {start}{near}?" if near else f"available commands: {', '.join(known)}"
    exit_with(f"unknown command {start}{args[0]}; {hint}", 2)


def _nearest(name: str, known: Collection[str]) -> str | None:
    """Return the most similar known name; None if none is similar."""
    return next(iter(get_close_matches(name, sorted(known), n=1, cutoff=NEAR)), None)


DESCRIPTION = (
    f"rlxf {__version__}: transformer agents for reinforcement learning. --version prints the version."
)
EXAMPLE = "Example: rlxf train gtrxl --help"
HELP = {"-h", "--help"}


def main(args: Sequence[str] | None = None) -> None:
    """Run a command.

    The exit status is 0 after success, and 2 with a one-line message after an error that the user can fix.
    It is 75 if a signal stopped a training run that can be resumed. Otherwise it is 130 after Ctrl-C, 143
    after SIGTERM and 138 after SIGUSR1; temporary files are removed. It is 141 without a message if the
    standard output is a closed pipe.

    Args:
        args: arguments of the command line; None for ``sys.argv[1:]``.
    """
    with (
        exit_on_closed_pipe(),
        print_warnings_once(),
        silence_disk_errors_of_threads(),
        not_writable_by_others(),
        exit_on_signals(),
    ):
        with report_errors(*PREPARATION_ERRORS):
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
    words = next((words for words in COMMANDS if args[: len(words.split())] == words.split()), None)
    if words is None:
        show_overview(args)
    return read_options(words, args[len(words.split()) :])


def read_options(words: str, args: list[str]) -> Command:
    """Parse the options of a command.

    Args:
        words: words of the command, e.g. "train dt".
        args: arguments after these words.

    Raises:
        SystemExit: as in `parse`.
    """
    options = resolve_name(COMMANDS[words])
    read = partial(
        tyro.cli,
        options,
        prog=f"rlxf {words}",
        description=_wrapped_description(options),
        default=_defaults(options, args),
        registry=_registry(options, args),
    )
    return _read_or_refuse(read, words, args)


def _wrapped_description(options: type) -> str:
    """Return the docstring of a command, wrapped to the width of the terminal.

    Lines are indented, because tyro joins other lines again. The example can be copied: it is one line.
    """
    width = get_terminal_size().columns
    text = (inspect.getdoc(options) or "").partition("\n\nArgs:")[0]
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n\n".join(
        indent(each if each.startswith("Example:") else fill(each, width - 1, break_on_hyphens=False), " ")
        for each in paragraphs
    )


def _read_or_refuse(read: Callable[..., Command], words: str, args: list[str]) -> Command:
    """Parse the options; unknown options and invalid counts are reported in one line."""
    if not HELP.intersection(args):
        refuse_unknown_options(args, option_names(read), f"rlxf {words} --help")
    try:
        return read(args=args)
    except NotACountError as error:
        exit_with(error.message(args), 2)


def _defaults(options: type, args: list[str]) -> Any:
    """Return the default options of a command with ``settings``, if published settings are named."""
    if "settings" not in inspect.signature(options).parameters:
        return tyro.MISSING_NONPROP
    from rlxf.cli.options.offline_options import default_options, settings_name

    name = settings_name(args)
    return tyro.MISSING_NONPROP if name is None else options(dataset=tyro.MISSING, **default_options(name))


def _registry(options: Any, args: list[str]) -> ConstructorRegistry | None:
    """Return the tyro registry of a command with a ``core``; other commands do not import torch."""
    if "core" not in inspect.signature(options).parameters:
        return None
    from rlxf.cli.spec_options import core_registry

    return core_registry(args, options.core_notes)


def show_overview(args: list[str]) -> NoReturn:
    """Print all commands, or those of the group that is the first word, and exit."""
    group = args[0] if args and args[0] in SUMMARIES else ""
    description = f"{SUMMARIES.get(group, DESCRIPTION)}\n\n{EXAMPLE}"
    rest = args[1:] if group else args
    refuse_unknown_command(group, rest)
    tyro.cli(_choices(group), prog=f"rlxf {group}".strip(), description=description, args=rest)
    raise AssertionError(f"tyro parsed {args} as a command, but no command has these words")


@dataclass(frozen=True)
class _Placeholder:
    """Placeholder of a command in an overview, which avoids the import of the command."""


def _choices(group: str) -> Any:
    """Return the words that may follow ``group``, as a tyro union."""
    following = [words.removeprefix(group).split()[0] for words in COMMANDS if words.startswith(group)]
    placeholders = [
        Annotated[_Placeholder, subcommand(word, description=SUMMARIES[f"{group} {word}".strip()])]
        for word in dict.fromkeys(following)
    ]
    # The hidden second member makes a union, so that tyro requires the word even if there is only one.
    return reduce(or_, [*placeholders, Annotated[None, Suppress]])
