"""Errors that occur while an agent is built from a file, among them settings of other versions."""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version

from rlxf.utils.errors import CheckpointError
from rlxf.utils.memory_budget import MemoryBudgetError

VERSION = version("rlxf")
BUILD_ERRORS = (
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that invalid values cause in code that builds an agent from a description."""


@contextmanager
def checkpoint_errors() -> Iterator[None]:
    """Convert errors that occur while an agent is built from a file to CheckpointError.

    Raises:
        CheckpointError: in place of MemoryBudgetError and of the exceptions in `BUILD_ERRORS`.
    """
    try:
        yield
    except CheckpointError:
        raise
    except MemoryBudgetError as error:
        raise CheckpointError(f"the checkpoint is not loaded: {error}") from error
    except BUILD_ERRORS as error:
        raise CheckpointError(
            f"the checkpoint is valid, but this version of rlxf cannot build its agent: {error!r}"
        ) from error


def checkpoint_errors_unless_overridden(settings: Collection[str]) -> AbstractContextManager[None]:
    """Return `checkpoint_errors()`, or a null context if the user passed settings, which may be the cause."""
    return nullcontext() if settings else checkpoint_errors()


def check_known(settings: Collection[str], known: Collection[str], written_by: str | None) -> None:
    """Raise CheckpointError if a file contains settings that this version of rlxf does not know.

    Args:
        settings: names of the settings in the file.
        known: names of the settings of the agent.
        written_by: version of rlxf that wrote the file; None if the file does not state it.
    """
    if unknown := sorted(set(settings) - set(known)):
        writer = "an unknown version of rlxf" if written_by is None else f"rlxf {written_by}"
        advice = f"load it with {writer if written_by else 'the version that wrote it'}"
        if written_by == VERSION:
            advice = "it was altered, or written by other code under the same version"
        raise CheckpointError(
            f"the checkpoint was written by {writer} and has the settings {', '.join(unknown)}, which rlxf "
            f"{VERSION} does not know; {advice}"
        )
