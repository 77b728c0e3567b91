"""From the words of the command line to a command that runs."""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pkgutil import resolve_name
from typing import Annotated, Any, NoReturn

import tyro
from tyro.conf import Suppress, subcommand
from tyro.constructors import ConstructorRegistry

from rlxf import __version__
from rlxf.cli.commands import COMMANDS, SUMMARIES, Command
from rlxf.cli.mistakes import (
    BUILDING,
    WORKING,
    disk_errors_told_once,
    ended_by_signals,
    in_one_line,
    warnings_in_one_line,
)
from rlxf.utils.permissions import not_writable_by_others

DESCRIPTION = f"rlxf {__version__}: transformer agents for reinforcement learning."
EXAMPLE = "Example: rlxf train gtrxl --help"


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line: leave with 2 and one line on a user's mistake, with 130 on Ctrl-C.

    SIGTERM and SIGUSR1 end it as Ctrl-C does, so that temporary files are removed: with 143 and 138. Commands
    that train handle them themselves.
    """
    with warnings_in_one_line(), disk_errors_told_once(), not_writable_by_others(), ended_by_signals():
        with in_one_line(*BUILDING):
            work = parse(args).prepare()
        with in_one_line(*WORKING):
            work()


def parse(args: Sequence[str] | None = None) -> Command:
    """The command that the arguments ask for, with its options; None: those of the program.

    Raises:
        SystemExit: with 0 behind a help text, with 2 if the arguments are wrong.
    """
    args = sys.argv[1:] if args is None else list(args)
    words = next((words for words in COMMANDS if args[: len(words.split())] == words.split()), None)
    if words is None:
        show_overview(args)
    return read_options(words, args[len(words.split()) :])


def read_options(words: str, args: list[str]) -> Command:
    """The dataclass of a command, filled from the arguments behind its words."""
    options = resolve_name(COMMANDS[words])
    return tyro.cli(
        options,
        prog=f"rlxf {words}",
        args=args,
        default=_defaults(options, args),
        registry=_registry(options, args),
    )


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
