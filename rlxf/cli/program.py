"""Entry point of ``rlxf``: parsing of the command line and execution of the command."""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from pkgutil import resolve_name
from typing import Annotated, Any, NoReturn

import tyro
from tyro.conf import Suppress, subcommand
from tyro.constructors import ConstructorRegistry

from rlxf import __version__
from rlxf.cli.commands import COMMANDS, SUMMARIES, Command
from rlxf.cli.counts import NotACountError
from rlxf.cli.mistakes import (
    BUILDING,
    WORKING,
    closed_pipe_ends_quietly,
    disk_errors_told_once,
    ended_by_signals,
    in_one_line,
    leave,
    warnings_in_one_line,
)
from rlxf.cli.near_names import option_names, refuse_unknown_command, refuse_unknown_options
from rlxf.cli.screen import show
from rlxf.utils.permissions import not_writable_by_others

DESCRIPTION = (
    f"rlxf {__version__}: transformer agents for reinforcement learning. --version prints the version."
)
EXAMPLE = "Example: rlxf train gtrxl --help"
HELP = {"-h", "--help"}


def main(args: Sequence[str] | None = None) -> None:
    """Run a command.

    The exit status is 0 after success, and 2 with a one-line message after an error that the user can fix.
    It is 75 if a signal stopped a training that can be resumed. Otherwise it is 130 after Ctrl-C, 143 after
    SIGTERM and 138 after SIGUSR1; temporary files are removed. It is 141 without a message if the standard
    output is a closed pipe.

    Args:
        args: arguments of the command line; None for ``sys.argv[1:]``.
    """
    with (
        closed_pipe_ends_quietly(),
        warnings_in_one_line(),
        disk_errors_told_once(),
        not_writable_by_others(),
        ended_by_signals(),
    ):
        with in_one_line(*BUILDING):
            work = parse(args).prepare()
        with in_one_line(*WORKING):
            work()


def parse(args: Sequence[str] | None = None) -> Command:
    """Return the command with its options; None for ``args`` means ``sys.argv[1:]``.

    Raises:
        SystemExit: with status 0 after a help text or the version, with 2 if the arguments are invalid.
    """
    args = sys.argv[1:] if args is None else list(args)
    if args == ["--version"]:
        show(f"rlxf {__version__}")
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
        default=_defaults(options, args),
        registry=_registry(options, args),
    )
    return _read_or_refuse(read, words, args)


def _read_or_refuse(read: Callable[..., Command], words: str, args: list[str]) -> Command:
    """Parse the options; unknown options and invalid counts are reported before other errors."""
    try:
        return read(args=args, console_outputs=bool(HELP.intersection(args)))
    except NotACountError as error:
        leave(error.message(args), 2)
    except SystemExit as exit_error:
        if exit_error.code != 2:
            raise
    refuse_unknown_options(args, option_names(read), f"rlxf {words} --help")
    return read(args=args)  # tyro reports all other errors


def _defaults(options: type, args: list[str]) -> Any:
    """Return the default options of a command with ``settings``, if published settings are named."""
    if "settings" not in inspect.signature(options).parameters:
        return tyro.MISSING_NONPROP
    from rlxf.cli.published import as_options, named

    name = named(args)
    return tyro.MISSING_NONPROP if name is None else options(dataset=tyro.MISSING, **as_options(name))


def _registry(options: type, args: list[str]) -> ConstructorRegistry | None:
    """Return the tyro registry of a command with a ``core``; other commands do not import torch."""
    if "core" not in inspect.signature(options).parameters:
        return None
    from rlxf.cli.core import core_registry

    return core_registry(args)


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
