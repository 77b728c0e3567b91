"""The value that a memory hands on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlxf.attention.index import Index


@dataclass(frozen=True, eq=False)
class State:
    """What a transformer remembers: the inputs of each layer for the last M tokens.

    Args:
        hidden: (L, B, M, C), oldest first, without gradient.
        index: (B, M), where those tokens stand; episode -1 for an empty slot.
    """

    hidden: Tensor
    index: Index

    @classmethod
    def empty(cls, layers: int, batch: int, length: int, like: Tensor, width: int) -> "State":
        """No token yet; type and device of ``like``."""
        hidden = torch.zeros(layers, batch, length, width, dtype=like.dtype, device=like.device)
        return cls(hidden, Index.empty(batch, length, like.device))

    def last(self, length: int) -> "State":
        """The last ``length`` tokens, as views."""
        start = self.hidden.shape[2] - length
        return State(self.hidden[:, :, start:], self.index.last(length))

    def rows(self, rows: Tensor) -> "State":
        """The chosen rows of the batch: ``rows`` is a bool (B,) or an int64 (N,) tensor."""
        return State(self.hidden[:, rows], self.index.rows(rows))
