"""Checks of the arguments of torch.distributions."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution

from rlxf.utils.shared_context import SharedContext


def unvalidated_distributions() -> SharedContext:
    """Skip torch's checks of the parameters and values of distributions, in all threads.

    Each check waits for an accelerator, and its branches cannot be traced. The callers check outputs, losses
    and gradients themselves. The context manager also works as a decorator.
    """
    return _UNVALIDATED


@contextmanager
def _without_checks() -> Iterator[None]:
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


_UNVALIDATED = SharedContext(_without_checks)
