"""Memory state that is passed from segment to segment."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from rlxf.attention.index import EMPTY, Index

NO_EPISODE = torch.iinfo(torch.long).max
"""Sentinel that is larger than any episode number."""


@dataclass(frozen=True, eq=False)
class State:
    """Memory of a transformer: the inputs of each layer for the last M tokens.

    Args:
        hidden: (L, B, M, C), oldest first, without gradient.
        index: (B, M), positions and episodes of these tokens; episode -1 marks an empty slot.
        older: state of one layer, (1, B, N, C), for the N tokens before them; None without kNN memory.
    """

    hidden: Tensor
    index: Index
    older: "State | None" = None

    @classmethod
    def empty(cls, layers: int, batch: int, length: int, like: Tensor, width: int) -> "State":
        """Create a state of empty slots with the dtype and device of ``like``."""
        hidden = torch.zeros(layers, batch, length, width, dtype=like.dtype, device=like.device)
        return cls(hidden, Index.empty(batch, length, like.device))

    def at(self, tokens: slice) -> "State":
        """Return the selected tokens, as views and without ``older``."""
        return State(self.hidden[:, :, tokens], self.index.at(tokens))

    def last(self, length: int) -> "State":
        """Return the last tokens, at most ``length``, as views and without ``older``."""
        return self.at(slice(max(0, self.index.shape[1] - length), None))

    def met_by(self, index: Index) -> "State":
        """Drop the oldest slots, up to the first whose episode can occur at ``index`` (B, T); as views."""
        queried, stored = index.episode, self.index.episode
        first = queried.masked_fill(queried == EMPTY, NO_EPISODE).amin(1, keepdim=True)
        relevant = (stored != EMPTY) & (stored >= first) & (stored <= queried.amax(1, keepdim=True))
        unused = relevant.any(0).cumsum(0) == 0
        return self.last(len(unused) - int(unused.sum()))

    def rows(self, rows: Tensor) -> "State":
        """Return the selected rows of the batch; ``rows`` is a bool (B,) mask or int64 (N,) row numbers."""
        older = None if self.older is None else self.older.rows(rows)
        return State(self.hidden[:, rows], self.index.rows(rows), older)


def joined(states: Sequence[State]) -> State:
    """Concatenate states along time."""
    index = reduce(Index.concatenate, (state.index for state in states))
    return State(torch.cat([state.hidden for state in states], dim=2), index)
