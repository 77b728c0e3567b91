"""The value that a memory hands on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from rlxf.attention.index import EMPTY, Index

NO_EPISODE = torch.iinfo(torch.long).max
"""Larger than any number of an episode."""


@dataclass(frozen=True, eq=False)
class State:
    """What a transformer remembers: the inputs of each layer for the last M tokens.

    Args:
        hidden: (L, B, M, C), oldest first, without gradient.
        index: (B, M), where those tokens stand; episode -1 for an empty slot.
        older: the inputs of one layer, (1, B, N, C), for the N tokens before them; None for nothing.
    """

    hidden: Tensor
    index: Index
    older: "State | None" = None

    @classmethod
    def empty(cls, layers: int, batch: int, length: int, like: Tensor, width: int) -> "State":
        """No token yet; type and device of ``like``."""
        hidden = torch.zeros(layers, batch, length, width, dtype=like.dtype, device=like.device)
        return cls(hidden, Index.empty(batch, length, like.device))

    def at(self, tokens: slice) -> "State":
        """The chosen ones of the M tokens alone, as views."""
        return State(self.hidden[:, :, tokens], self.index.at(tokens))

    def last(self, length: int) -> "State":
        """The last tokens alone, at most ``length``, as views."""
        return self.at(slice(max(0, self.index.shape[1] - length), None))

    def met_by(self, index: Index) -> "State":
        """Without the oldest slots, as far as no token at ``index`` (B, T) is of their episode; as views."""
        asked, held = index.episode, self.index.episode
        first = asked.masked_fill(asked == EMPTY, NO_EPISODE).amin(1, keepdim=True)
        met = (held != EMPTY) & (held >= first) & (held <= asked.amax(1, keepdim=True))
        before = met.any(0).cumsum(0) == 0
        return self.last(len(before) - int(before.sum()))

    def rows(self, rows: Tensor) -> "State":
        """The chosen rows of the batch: ``rows`` is a bool (B,) or an int64 (N,) tensor."""
        older = None if self.older is None else self.older.rows(rows)
        return State(self.hidden[:, rows], self.index.rows(rows), older)


def joined(states: Sequence[State]) -> State:
    """The tokens of one after those of the other."""
    index = reduce(Index.concatenate, (state.index for state in states))
    return State(torch.cat([state.hidden for state in states], dim=2), index)
