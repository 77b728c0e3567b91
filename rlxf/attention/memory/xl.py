"""Transformer-XL memory: the last M inputs of every layer, without gradient."""

from dataclasses import dataclass
from typing import ClassVar

from rlxf.attention.memory.base import Memory
from rlxf.utils.checks import check_int


@dataclass(frozen=True)
class XL(Memory):
    """Transformer-XL memory ``m <- SG([m ; h])[-M:]``: keys and values come from ``[m ; h]``, queries from h.

    m of layer n holds its inputs ``h^(n-1)``. Keys and values are projected from m with the
    current weights. SG stops the gradient. The token index separates episodes.

    Source: Dai et al. 2019, arXiv:1901.02860, section 3.2.

    Args:
        length: memory length M in tokens, at least 1.

    Raises:
        TypeError: if length is not an int.
        ValueError: if it is less than 1. For no memory use None instead of `XL`.
    """

    paper: ClassVar[str] = "Dai et al. 2019, arXiv:1901.02860"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "length pairs per token"
    length: int = 128

    def __post_init__(self) -> None:
        check_int("XL memory length", self.length)
