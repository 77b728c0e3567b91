"""Checks of the arguments of torch.distributions."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution


@contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """Skip torch's checks of the parameters and values of distributions.

    Each check waits for an accelerator, and its branches cannot be traced. The callers check outputs, losses
    and gradients themselves.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
