"""The description of an agent in a file: which version of rlxf wrote it, and what this one makes of it."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.metadata import version

from rlxf.training.errors import CheckpointError

VERSION = version("rlxf")


@contextmanager
def described() -> Iterator[None]:
    """What the description of an agent lacks or has wrong is the file's fault, and said so."""
    try:
        yield
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint is whole, but this version of rlxf cannot build its agent: {error!r}"
        ) from error


def check_known(settings: Collection[str], known: Collection[str], written_by: str | None) -> None:
    """Raise CheckpointError if a setting is none of those that are known here.

    Args:
        settings: names of those in the file.
        known: names of those that the agent has.
        written_by: version of rlxf that wrote the file; None if it does not say.
    """
    if unknown := sorted(set(settings) - set(known)):
        writer = "another version of rlxf" if written_by is None else f"rlxf {written_by}"
        raise CheckpointError(
            f"the checkpoint was written by {writer} and has the settings {', '.join(unknown)}, which rlxf "
            f"{VERSION} does not know; upgrade rlxf"
        )
