"""What every kernel offers."""

from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor


class Kernel(Protocol):
    """A weighted average of values, linear in them. A kernel without parameters is its own module."""

    paper: ClassVar[str]
    causal: ClassVar[str]
    cost: ClassVar[str]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor, dropout: float
    ) -> Tensor:
        """Average the values.

        Args:
            q: queries, (B, H, Tq, D).
            k: keys, (B, H, Tk, D).
            v: values, (B, H, Tk, V); V is D as a rule.
            bias: what positions add to the scaled scores, (B, H, Tq, Tk); None for nothing.
            mask: 0 for keys that a query may see, -inf for others, (B, 1, Tq, Tk).
            dropout: probability with which a weight is set to 0.

        Returns:
            (B, H, Tq, V).
        """
        ...


@runtime_checkable
class Pairwise(Kernel, Protocol):
    """A kernel that computes the weight of each pair of query and key: it takes a bias for each."""

    def weights(self, q: Tensor, k: Tensor, bias: Tensor | None, mask: Tensor, dropout: float) -> Tensor:
        """The weights that a call averages values with, (B, H, Tq, Tk); arguments as there."""
        ...
