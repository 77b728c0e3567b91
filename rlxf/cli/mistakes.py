"""What a user can mend is told in one line; a bug keeps its traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import gymnasium
from rich.console import Console

from rlxf.envs.errors import FaultyEnvironmentError

BUILDING = (ValueError, TypeError, OSError, ImportError, gymnasium.error.Error)
"""While what was asked for is checked and built, these say that it cannot be had."""
WORKING = (FaultyEnvironmentError, OSError)
"""Later, only these come from outside: an environment that gives NaN, a disk that is full."""


@contextmanager
def in_one_line(*mistakes: type[Exception]) -> Iterator[None]:
    """Leave with 2 on a mistake of the user, with 130 on Ctrl-C; anything else passes."""
    try:
        yield
    except KeyboardInterrupt:
        leave("interrupted", 130)
    except mistakes as error:
        leave(str(error), 2)


def leave(message: str, status: int) -> NoReturn:
    """End the program with one red line."""
    line = " ".join(f"rlxf: {message}".split())
    Console(stderr=True).print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(status)
