"""Definition of an attack with malicious files."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.hostile.world import World

Action = Callable[[], tuple[int, str]]
"""Use of the files by a user; returns exit status and output."""


@dataclass(frozen=True)
class Attack:
    """Malicious files, and their use.

    Args:
        prepare: function that creates the files and returns the action that is audited.
        message: expected part of the error message; None if the files are used without harm.
    """

    prepare: Callable[[World], Action]
    message: str | None


def refused_or_done(use: Callable[[], object]) -> tuple[int, str]:
    """Call Python code; return status 2 and the message for an expected error, else status 0."""
    try:
        use()
    except (ValueError, TypeError, OSError) as error:
        return 2, str(error)
    return 0, ""
