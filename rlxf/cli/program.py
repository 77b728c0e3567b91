"""From the words of the command line to a command that runs."""

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
    """Run the command line.

    Exit status: 2 with one line on a user's mistake, 130 on Ctrl-C, 75 after a signal from which a training
    can be resumed, 141 without a message if the standard output is closed. SIGTERM and SIGUSR1
    end other commands as Ctrl-C does, so that temporary files are removed: with 143 and 138.
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
    """The command that the arguments ask for, with its options; None: those of the program.

    Raises:
        SystemExit: with 0 after a help text or the version, with 2 if the arguments are wrong.
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
    """Return the dataclass of a command, filled from the arguments after its words.

    Raises:
        SystemExit: as `parse`.
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
    """Read the options; unknown options and invalid counts are reported first."""
    try:
        return read(args=args, console_outputs=bool(HELP.intersection(args)))
    except NotACountError as error:
        leave(error.message(args), 2)
    except SystemExit as leaving:
        if leaving.code != 2:
            raise
    refuse_unknown_options(args, option_names(read), f"rlxf {words} --help")
    return read(args=args)  # tyro reports all other errors


def _defaults(options: type, args: list[str]) -> Any:
    """What a command with ``settings`` leaves options at: those of the settings that are named."""
    if "settings" not in inspect.signature(options).parameters:
        return tyro.MISSING_NONPROP
    from rlxf.cli.published import as_options, named

    name = named(args)
    return tyro.MISSING_NONPROP if name is None else options(dataset=tyro.MISSING, **as_options(name))


def _registry(options: type, args: list[str]) -> ConstructorRegistry | None:
    """How a command with a ``core`` reads it. Others are spared the attention core and torch."""
    if "core" not in inspect.signature(options).parameters:
        return None
    from rlxf.cli.core import core_registry

    return core_registry(args)


def show_overview(args: list[str]) -> NoReturn:
    """Say which commands there are: all of them, or those behind the first word; then leave."""
    group = args[0] if args and args[0] in SUMMARIES else ""
    description = f"{SUMMARIES.get(group, DESCRIPTION)}\n\n{EXAMPLE}"
    rest = args[1:] if group else args
    refuse_unknown_command(group, rest)
    tyro.cli(_choices(group), prog=f"rlxf {group}".strip(), description=description, args=rest)
    raise AssertionError(f"{args} was taken for a command, and no command has these words")


@dataclass(frozen=True)
class _NotAsked:
    """Stands for a command in an overview, so that nothing of it has to be imported."""


def _choices(group: str) -> Any:
    """The words that may follow ``group``, as a tyro union."""
    behind = [words.removeprefix(group).split()[0] for words in COMMANDS if words.startswith(group)]
    stand_ins = [
        Annotated[_NotAsked, subcommand(word, description=SUMMARIES[f"{group} {word}".strip()])]
        for word in dict.fromkeys(behind)
    ]
    # Beside a choice that is not shown, a lone word is still asked for.
    return reduce(or_, [*stand_ins, Annotated[None, Suppress]])
