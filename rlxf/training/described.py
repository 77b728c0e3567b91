"""The description of an agent in a file: which version of rlxf wrote it, and what this one makes of it."""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version

from rlxf.training.errors import CheckpointError
from rlxf.utils.memory_budget import MemoryBudgetError

VERSION = version("rlxf")
UNFIT = (
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What values make of code that was not written for them."""


@contextmanager
def described() -> Iterator[None]:
    """What the description of an agent lacks or has wrong is the file's fault, and said so."""
    try:
        yield
    except CheckpointError:
        raise
    except MemoryBudgetError as error:
        raise CheckpointError(f"the checkpoint is not loaded: {error}") from error
    except UNFIT as error:
        raise CheckpointError(
            f"the checkpoint is whole, but this version of rlxf cannot build its agent: {error!r}"
        ) from error


def blaming_the_file(settings: Collection[str]) -> AbstractContextManager[None]:
    """`described`; but where there are settings of yours, which may be as wrong, errors stay as they are."""
    return nullcontext() if settings else described()


def check_known(settings: Collection[str], known: Collection[str], written_by: str | None) -> None:
    """Raise CheckpointError if a setting is none of those that are known here.

    Args:
        settings: names of those in the file.
        known: names of those that the agent has.
        written_by: version of rlxf that wrote the file; None if it does not say.
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
