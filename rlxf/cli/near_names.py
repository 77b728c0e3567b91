"""Errors for unknown options and commands, which propose the most similar name."""

import io
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stdout, suppress
from difflib import get_close_matches
from typing import Any

from rlxf.cli.commands import COMMANDS
from rlxf.cli.mistakes import leave

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
            leave(f"unknown option {name}; {f'did you mean {near}?' if near else f'see: {help_command}'}", 2)


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
    leave(f"unknown command {start}{args[0]}; {hint}", 2)


def _nearest(name: str, known: Collection[str]) -> str | None:
    """Return the most similar known name; None if none is similar."""
    return next(iter(get_close_matches(name, sorted(known), n=1, cutoff=NEAR)), None)
