"""Transformer-XL memory: the last M inputs of every layer, without gradient."""

from dataclasses import dataclass
from typing import ClassVar

from rlxf.attention.checks import check_whole
from rlxf.attention.memory.base import Memory


@dataclass(frozen=True)
class XL(Memory):
    """``m <- SG([m ; h])[-M:]``: keys and values of a layer read ``[m ; h]``, queries read h.

    m of layer n holds its inputs ``h^(n-1)``. Keys and values are projected anew from m, with the
    weights of the day. No gradient flows into m. Episodes stay apart by their index.

    Source: Dai et al. 2019, arXiv:1901.02860, section 3.2.

    Args:
        length: tokens remembered M, at least 1.

    Raises:
        TypeError: if length is no whole number.
        ValueError: if it is less than 1. For no memory use None in place of `XL`.
    """

    paper: ClassVar[str] = "Dai et al. 2019, arXiv:1901.02860"
    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "length pairs a token"
    length: int = 128

    def __post_init__(self) -> None:
        check_whole("XL memory length", self.length)
