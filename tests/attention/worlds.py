"""Random segments of experience: tokens of episodes, with empty slots between or inside episodes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlxf.attention import Context, TokenIndex, TransformerSpec
from rlxf.attention.token_index import EMPTY

BATCH = 2
CONTEXT = 5

ON, END, RESET, GAP = "on", "end", "reset", "gap"
"""Next token; last token of its episode; empty slot, then a new episode; empty slot inside an episode."""

BETWEEN = (ON, ON, ON, ON, END, RESET)
ANYWHERE = (*BETWEEN, GAP)


def row(moves: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the positions and episodes that a sequence of moves gives."""
    position, episode, slots = 0, 0, []
    for move in moves:
        slots.append((position, EMPTY if move in (RESET, GAP) else episode))
        position += move in (ON, END)
        if move in (END, RESET):
            position, episode = 0, episode + 1
    return [slot[0] for slot in slots], [slot[1] for slot in slots]


def index_of(rows: Sequence[Sequence[str]]) -> TokenIndex:
    """Create an index with one batch row per list of moves."""
    positions, episodes = zip(*(row(moves) for moves in rows), strict=True)
    return TokenIndex(torch.tensor(positions), torch.tensor(episodes))


@dataclass(frozen=True)
class Segment:
    """Tokens x (B, T, C), their index, and a decoder's context."""

    x: Tensor
    index: TokenIndex
    context: Context | None

    @property
    def length(self) -> int:
        return self.x.shape[1]

    @property
    def filled(self) -> Tensor:
        """Mask of the slots that hold a token, (B, T) bool."""
        return self.index.episode != EMPTY

    def part(self, start: int, end: int) -> "Segment":
        # Contiguous, because BLAS rounds strided views differently and some tests compare bits.
        index = TokenIndex(self.index.position[:, start:end], self.index.episode[:, start:end])
        return Segment(self.x[:, start:end].contiguous(), index, self.context)

    def cut(self, lengths: Sequence[int]) -> "Iterator[Segment]":
        """Yield consecutive segments of the given lengths."""
        for start, end in pairwise(accumulate(lengths, initial=0)):
            yield self.part(start, end)

    def with_tokens(self, x: Tensor) -> "Segment":
        return replace(self, x=x)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return normal random numbers from a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def context_for(
    spec: TransformerSpec, index: TokenIndex, dtype: torch.dtype = torch.float64
) -> Context | None:
    """Return context tokens of some of the episodes, with empty slots; other episodes have no context."""
    if not spec.cross_attention:
        return None
    batch = index.shape[0]
    episode = (torch.arange(CONTEXT) % 3).expand(batch, -1) - 1
    where = TokenIndex(torch.arange(CONTEXT).expand(batch, -1), episode)
    return Context(numbers(batch, CONTEXT, spec.width, seed=1, dtype=dtype), where)


def random_segment(spec: TransformerSpec, index: TokenIndex, dtype: torch.dtype = torch.float64) -> Segment:
    """Return random tokens for an index."""
    return Segment(numbers(*index.shape, spec.width, dtype=dtype), index, context_for(spec, index, dtype))


def random_index(batch: int, length: int, seed: int = 0, moves: Sequence[str] = BETWEEN) -> TokenIndex:
    """Return a random index from a seed, for tests that need a fixed number of trials."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(moves), (batch, length), generator=generator).tolist()
    return index_of([[moves[number] for number in one] for one in drawn])


@st.composite
def segmented_index(draw: st.DrawFn, moves: Sequence[str] = BETWEEN) -> tuple[TokenIndex, list[int]]:
    """Strategy for an index and the lengths of the segments that it is split into."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    one = st.lists(st.sampled_from(moves), min_size=sum(lengths), max_size=sum(lengths))
    return index_of(draw(st.lists(one, min_size=BATCH, max_size=BATCH))), lengths
