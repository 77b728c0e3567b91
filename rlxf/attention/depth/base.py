"""What every depth offers: which layers tokens pass, and how long they go on."""

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from rlxf.attention.index import Index
from rlxf.attention.technique import Technique

Judge = Callable[[Tensor], Tensor]
"""Outputs (..., C) -> how far the likeliest choice that is read off them is ahead, (...): see `lead`."""


class Passes(Protocol):
    """The passes that tokens may take through layers, of one call of a transformer.

    A pass is entered by all tokens, in order, whether they take it or not: what later tokens see of them is
    read off what they enter it with. Tokens x are the stream that residuals join: as a rule (B, T, C).
    """

    @property
    def count(self) -> int:
        """Passes N that there are."""
        ...

    @property
    def index(self) -> Index:
        """Where tokens stand, (B, T)."""
        ...

    @property
    def filled(self) -> Tensor:
        """(B, T) bool: tokens, as against empty slots."""
        ...

    def through(self, x: Tensor) -> Tensor:
        """Tokens x (B, T, C) behind all passes, each taken once: those that ask, (B, Tq, C)."""
        ...

    def enter(self, number: int, x: Tensor) -> Tensor:
        """Tokens x (B, T, C) as pass ``number`` reads them; what is remembered of them there."""
        ...

    def run(self, number: int, x: Tensor) -> Tensor:
        """What the layer of a pass makes of all that entered it: (B, T, C), in the last pass (B, Tq, C)."""
        ...

    def leave_out(self, number: int, x: Tensor) -> None:
        """Let later tokens see x, which entered a pass that nobody takes."""
        ...

    def read(self, x: Tensor) -> Tensor:
        """What attention reads of the stream x: (B, T, C)."""
        ...

    def asking(self, x: Tensor) -> Tensor:
        """Those of all tokens (B, T, ...) whose outputs are wanted, (B, Tq, ...)."""
        ...


class Taken:
    """How many passes tokens took that acted, since last asked."""

    def __init__(self) -> None:
        self._passes: Tensor | float = 0.0
        self._tokens: Tensor | int = 0

    def add(self, passes: Tensor, tokens: Tensor) -> None:
        """So many passes were taken by so many tokens, scalars."""
        self._passes, self._tokens = self._passes + passes, self._tokens + tokens

    def mean(self) -> Tensor | None:
        """Passes of a token, a scalar; None if there was none. What is counted begins anew."""
        passes, tokens = self._passes, self._tokens
        self._passes, self._tokens = 0.0, 0
        return torch.as_tensor(passes / tokens) if tokens else None


class Processor(nn.Module):
    """How tokens go through the passes. This one: each token takes each pass once."""

    def forward(self, x: Tensor, passes: Passes) -> Tensor:
        """Tokens x (B, T, C) -> what comes of those that ask, (B, Tq, C)."""
        return passes.through(x)

    def early(self, x: Tensor, passes: Passes, judge: Judge | None) -> Tensor:
        """`forward` of tokens that act, as early as they may: by default as they learn.

        Args:
            x: the stream before the first pass.
            passes: to take or to leave out.
            judge: what is read off a stream (B, Tq, ...); None if nothing is.
        """
        y: Tensor = self(x, passes)
        return y

    def penalty(self) -> Tensor | None:
        """What is added to the loss, a scalar, for the last forward with gradient; None for nothing.

        Asked again without a new pass, there is none.
        """
        return None

    def mean_depth(self) -> Tensor | None:
        """Passes that a token took on average in the last forward; None if all take all."""
        return None

    def acting_depth(self) -> Tensor | None:
        """As `mean_depth`, over all tokens that acted (`early`) since last asked; None if all take all."""
        return None


class Depth(Technique):
    """Base of the depth techniques: frozen dataclasses that build a `Processor`."""

    causal: ClassVar[str] = "token by token"

    def layer_of(self, number: int) -> int:
        """The layer, counted from 0, whose weights a pass has."""
        return number

    def build(self, width: int, passes: int) -> Processor:
        """The module; as a rule it has no parameters."""
        return Processor()
