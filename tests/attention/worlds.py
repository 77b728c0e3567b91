"""Random stretches of experience: tokens, cut into episodes, with empty slots between or inside them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlxf.attention import Context, Index, TransformerSpec
from rlxf.attention.index import EMPTY

BATCH = 2
CONTEXT = 5

ON, END, RESET, GAP = "on", "end", "reset", "gap"
"""Next token; last token of its episode; empty slot, then a new episode; empty slot inside an episode."""

BETWEEN = (ON, ON, ON, ON, END, RESET)
ANYWHERE = (*BETWEEN, GAP)


def row(moves: Sequence[str]) -> tuple[list[int], list[int]]:
    """Positions and episodes that the moves make."""
    position, episode, slots = 0, 0, []
    for move in moves:
        slots.append((position, EMPTY if move in (RESET, GAP) else episode))
        position += move in (ON, END)
        if move in (END, RESET):
            position, episode = 0, episode + 1
    return [slot[0] for slot in slots], [slot[1] for slot in slots]


def index_of(rows: Sequence[Sequence[str]]) -> Index:
    """One row of the batch for each list of moves."""
    positions, episodes = zip(*(row(moves) for moves in rows), strict=True)
    return Index(torch.tensor(positions), torch.tensor(episodes))


@dataclass(frozen=True)
class World:
    """Tokens x (B, T, C), where they stand, and a decoder's context."""

    x: Tensor
    index: Index
    context: Context | None

    @property
    def length(self) -> int:
        return self.x.shape[1]

    @property
    def filled(self) -> Tensor:
        """(B, T) bool: slots that hold a token."""
        return self.index.episode != EMPTY

    def part(self, start: int, end: int) -> "World":
        # Contiguous: BLAS rounds a view of strided rows otherwise, and some tests compare bits.
        index = Index(self.index.position[:, start:end], self.index.episode[:, start:end])
        return World(self.x[:, start:end].contiguous(), index, self.context)

    def cut(self, lengths: Sequence[int]) -> "Iterator[World]":
        """The segments, in order."""
        for start, end in pairwise(accumulate(lengths, initial=0)):
            yield self.part(start, end)

    def with_tokens(self, x: Tensor) -> "World":
        return replace(self, x=x)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal random numbers from a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def context_for(spec: TransformerSpec, index: Index, dtype: torch.dtype = torch.float64) -> Context | None:
    """Context tokens of some of the episodes, with empty slots; episodes beyond see no context."""
    if not spec.cross_attention:
        return None
    batch = index.shape[0]
    episode = (torch.arange(CONTEXT) % 3).expand(batch, -1) - 1
    where = Index(torch.arange(CONTEXT).expand(batch, -1), episode)
    return Context(numbers(batch, CONTEXT, spec.width, seed=1, dtype=dtype), where)


def world(spec: TransformerSpec, index: Index, dtype: torch.dtype = torch.float64) -> World:
    """Random tokens for an index."""
    return World(numbers(*index.shape, spec.width, dtype=dtype), index, context_for(spec, index, dtype))


def random_index(batch: int, length: int, seed: int = 0, moves: Sequence[str] = BETWEEN) -> Index:
    """An index drawn from a seed, for tests that count trials."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(moves), (batch, length), generator=generator).tolist()
    return index_of([[moves[number] for number in one] for one in drawn])


@st.composite
def segmented(draw: st.DrawFn, moves: Sequence[str] = BETWEEN) -> tuple[Index, list[int]]:
    """An index and the lengths of the segments that it is read in."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    one = st.lists(st.sampled_from(moves), min_size=sum(lengths), max_size=sum(lengths))
    return index_of(draw(st.lists(one, min_size=BATCH, max_size=BATCH))), lengths
