"""What every pattern offers."""

from typing import ClassVar, Protocol

from torch import Tensor

UNLIMITED = 2**62
"""Reach of a pattern without a bound."""


class Pattern(Protocol):
    """A rule on positions: which keys may a query see?

    Whether keys ahead of the query are hidden is the transformer's business (``causal``), and
    so are episodes and empty slots. A pattern has no parameters.
    """

    paper: ClassVar[str]

    @property
    def reach(self) -> int:
        """Largest distance, in tokens, at which a query may see a key."""
        ...

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether query position i may see key position j; the two broadcast."""
        ...
