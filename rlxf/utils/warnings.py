"""Warnings that name the line of the user's program, and a context in which output is hidden."""

import io
import logging
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType

from rlxf.utils.shared_context import SharedContext

PACKAGE = str(Path(__file__).parents[1]) + os.sep
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Folders of Python's modules and of installed packages."""


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, with the position of the innermost call that is neither in this package nor in another library.

    A fixed ``stacklevel`` would depend on the functions and context managers in between. If all callers are
    in libraries, the position is that of the innermost one outside of this package.

    Args:
        message: text of the warning.
        category: class of the warning.
    """
    callers = list(_frames(sys._getframe(1)))
    outside = [frame for frame in callers if not _is_in(frame, (PACKAGE,))] or callers[-1:]
    frame = next((frame for frame in outside if not _is_in(frame, LIBRARIES)), outside[0])
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    module = names.get("__name__", "<unknown>")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_in(frame: FrameType, folders: tuple[str, ...]) -> bool:
    return frame.f_code.co_filename.startswith(folders)


def silenced() -> SharedContext:
    """Hide what torch prints and logs about its own functions and, after a failure, about the graph.

    Output and log of the whole process are hidden meanwhile, those of other threads too.
    """
    return _SILENCED


@contextmanager
def _without_output() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


_SILENCED = SharedContext(_without_output)
