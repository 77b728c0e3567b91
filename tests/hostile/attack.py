"""What an attack is."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.hostile.world import World

Action = Callable[[], tuple[int, str]]
"""What a user does with the files; gives an exit status and what is printed."""


@dataclass(frozen=True)
class Attack:
    """Files of a stranger, and what a user does with them.

    Args:
        prepare: makes the files; what it returns is watched.
        told: part of the message by which they are refused; None if they are used, without harm.
    """

    prepare: Callable[[World], Action]
    told: str | None


def refused_or_done(use: Callable[[], object]) -> tuple[int, str]:
    """What Python code comes to: an error that users are told of is a refusal."""
    try:
        use()
    except (ValueError, TypeError, OSError) as error:
        return 2, str(error)
    return 0, ""
