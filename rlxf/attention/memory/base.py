"""Interface of memories, the state that they keep, and the view that a segment has of it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.cache import KVCache
from rlxf.attention.patterns.base import UNLIMITED, Pattern
from rlxf.attention.recurrent.base import EpisodeRuns, MixerState, RecurrentState
from rlxf.attention.relative import DistanceTables
from rlxf.attention.technique import SpecView, Technique
from rlxf.attention.token_index import EMPTY, TokenIndex
from rlxf.utils.errors import CompilationError

NO_EPISODE = torch.iinfo(torch.long).max
"""Sentinel that is larger than any episode number."""


@dataclass(frozen=True, eq=False)
class State:
    """Memory of a transformer: the inputs of each layer for the last M tokens.

    Args:
        hidden: (L, B, M, C), oldest first, without gradient.
        index: (B, M), positions and episodes of these tokens; episode -1 marks an empty slot.
        older: state of one layer, (1, B, N, C), for the N tokens before them; None without kNN memory.
        recurrent: states of the recurrent layers, and the part of the memory with a fixed size, after the
            last token; None without either.
    """

    hidden: Tensor
    index: TokenIndex
    older: "State | None" = None
    recurrent: RecurrentState | None = None

    @classmethod
    def empty(cls, layers: int, batch: int, length: int, like: Tensor, width: int) -> "State":
        """Create a state of empty slots with the dtype and device of ``like``."""
        hidden = torch.zeros(layers, batch, length, width, dtype=like.dtype, device=like.device)
        return cls(hidden, TokenIndex.empty(batch, length, like.device))

    def at(self, tokens: slice) -> "State":
        """Return the selected tokens, as views, without ``older`` and ``recurrent``."""
        return State(self.hidden[:, :, tokens], self.index.at(tokens))

    def last(self, length: int) -> "State":
        """Return the last tokens like `at`, at most ``length``."""
        return self.at(slice(max(0, self.index.shape[1] - length), None))

    def relevant_to(self, index: TokenIndex) -> "State":
        """Drop the oldest slots, up to the first whose episode can occur at ``index`` (B, T); as views."""
        queried, stored = index.episode, self.index.episode
        first = queried.masked_fill(queried == EMPTY, NO_EPISODE).amin(1, keepdim=True)
        relevant = (stored != EMPTY) & (stored >= first) & (stored <= queried.amax(1, keepdim=True))
        unused = relevant.any(0).cumsum(0) == 0
        return self.last(len(unused) - int(unused.sum()))

    def padded(self, length: int) -> "State":
        """Return a state of ``length`` slots: these tokens without ``older``, then empty slots."""
        layers, batch, count, width = self.hidden.shape
        free = State.empty(layers, batch, length - count, self.hidden, width)
        return concatenate_states([self, free])

    def rows(self, rows: Tensor | slice) -> "State":
        """Return the selected rows of the batch: a bool (B,) mask, int64 (N,) row numbers, or a slice."""
        older = None if self.older is None else self.older.rows(rows)
        recurrent = None if self.recurrent is None else self.recurrent.rows(rows)
        return State(self.hidden[:, rows], self.index.rows(rows), older, recurrent)


def concatenate_states(states: Sequence[State]) -> State:
    """Concatenate states along time."""
    index = reduce(TokenIndex.concatenate, (state.index for state in states))
    return State(torch.cat([state.hidden for state in states], dim=2), index)


@dataclass(frozen=True, eq=False)
class MemoryView:
    """View of a memory state for a segment. This base class shows every token of the state unchanged.

    Args:
        state: memory state; None for no memory.
        index: (B, T), positions and episodes of the segment's tokens.
    """

    state: State | None
    index: TokenIndex

    @property
    def key(self) -> TokenIndex:
        """Index of the keys, (B, M + T): memory first, then the segment."""
        return self.index if self.state is None else self.state.index.concatenate(self.index)

    def adapt_masks(self, masks: Sequence[AttentionMask]) -> Sequence[AttentionMask]:
        """Return the attention masks of each pass, adapted to this memory.

        Args:
            masks: masks of each pass, as derived from index and pattern.
        """
        return masks

    def tokens(self, pass_index: int, x: Tensor) -> Tensor | None:
        """Return the memory tokens of a pass, (B, M, C), without gradient; None for no memory.

        Args:
            pass_index: number of the pass, from 0.
            x: inputs of the pass for the segment, (B, T, C).
        """
        return None if self.state is None else self.state.hidden[pass_index]

    def weights_by_token(self, pass_index: int, weights: Tensor) -> Tensor:
        """Convert weights over the keys of a pass to weights over tokens of state and segment.

        Returns:
            (B, H, Tq, M + T).
        """
        return weights

    @property
    def has_penalty(self) -> bool:
        """Return whether this memory has an auxiliary loss."""
        return False

    def penalty(self, hidden: Sequence[Tensor]) -> Tensor | None:
        """Return the auxiliary loss, a scalar, given the inputs (B, T, C) of each pass; None for none."""
        return None


Mask = TypeVar("Mask", bound=AttentionMask)


def extend_mask(kind: type[Mask], mask: AttentionMask, **options: Any) -> Mask:
    """Return a mask of another kind with the fields of ``mask`` and further options."""
    return kind(**{field.name: getattr(mask, field.name) for field in fields(AttentionMask)}, **options)


def extend_masks(kind: type[Mask], masks: Sequence[AttentionMask], **options: Any) -> list[Mask]:
    """Return `extend_mask` of each mask; passes that share a mask still share one."""
    extended = {id(mask): extend_mask(kind, mask, **options) for mask in masks}
    return [extended[id(mask)] for mask in masks]


class Memory(Technique, ABC):
    """Base of the memory techniques: frozen dataclasses that define which earlier tokens are visible."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of tokens M in a state."""

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless this memory is compatible with the other settings of a transformer."""
        if not choices.causal:
            raise ValueError(
                f"memory {self} needs causal=True, since stored tokens cannot attend to future ones; use "
                f"memory=None in a bidirectional transformer"
            )

    def check_full_pattern(self, choices: SpecView) -> None:
        """Raise ValueError unless the pattern is `Full`, for a memory that defines the visible tokens."""
        if not choices.pattern.allows_all_keys:
            raise ValueError(
                f"{self} defines the visible tokens itself, and pattern {choices.pattern} would hide some of "
                f"them; use pattern=Full()"
            )

    def check_full_softmax(self, choices: SpecView) -> None:
        """Raise ValueError unless the kernel is a softmax over all visible keys."""
        if choices.kernel.softmax_distance != UNLIMITED:
            raise ValueError(
                f"{self} requires a softmax over all visible keys, got {choices.kernel}; "
                f"use kernel=Softmax() or memory=XL({self.length})"
            )

    def check_attention_everywhere(self, choices: SpecView) -> None:
        """Raise ValueError if a layer has a recurrent mixer, for a memory with modules in each layer."""
        if choices.recurrence is not None:
            raise ValueError(
                f"memory {self} needs attention in every layer, but some have the recurrence "
                f"{choices.recurrence}; use memory=XL(M), or None if no layer has attention"
            )

    @property
    def capacity(self) -> int:
        """Maximum distance, in tokens, over all layers; the default is M."""
        return self.length

    def for_layer(self, layer: int, layers: int) -> "Memory":
        """Return the memory of one layer, numbered from 0; by default all layers have the same."""
        return self

    def older_layer(self, layers: int) -> int | None:
        """Return the number of the layer, from 0, whose inputs are in ``State.older``; None for none."""
        return None

    def check_gaps(self) -> None:
        """Raise ValueError if an empty slot within an episode would discard further tokens."""

    def empty(self, layers: int, batch: int, like: Tensor, width: int) -> State:
        """Return an empty state with the dtype and device of ``like``."""
        return State.empty(layers, batch, self.length, like, width)

    def visible_pattern(self, pattern: Pattern) -> Pattern:
        """Return the pattern of tokens that are visible raw or compressed; by default ``pattern``."""
        return pattern

    @property
    def segment_length(self) -> int | None:
        """Tokens of a segment with memory tokens, for a `SegmentedTransformer`; None without them."""
        return None

    def check_capture(self, choices: SpecView) -> None:
        """Raise CompilationError for a memory that selects or summarizes tokens by their values."""
        if self.affects_one_segment or self.segment_length is not None:
            raise CompilationError(f"the branches of the memory {self} depend on values")

    @property
    def affects_one_segment(self) -> bool:
        """True if a segment without a state before it differs from one of a transformer without memory."""
        return type(self).view is not Memory.view

    def covers(self, pattern: Pattern) -> bool:
        """Return whether the tokens that a query may attend to never reach beyond a state."""
        return self.visible_pattern(pattern).max_distance <= self.length

    def check_traceable(self) -> None:
        """Raise ValueError if torch.export cannot trace an acting step with this memory."""

    def check_recomputable(self) -> None:
        """Raise ValueError if a state depends on more than a fixed number of steps."""

    def initial_carry(self, layers: int, batch: int, like: Tensor, width: int) -> MixerState:
        """Return the part of the memory in `RecurrentState.memory` before the first token; by default none.

        It is of fixed size and lasts from segment to segment; a rollout stores it at segment starts only. The
        first axis of each tensor is the batch B.
        """
        return {}

    def carry(self, state: MixerState, hidden: Tensor, runs: EpisodeRuns) -> MixerState:
        """Return the part of the memory in `RecurrentState.memory` after T tokens, without gradient.

        Args:
            state: the same part before the tokens; it is not modified.
            hidden: (L, B, T, C), inputs of each layer.
            runs: episodes of the tokens.
        """
        return state

    def build(self, width: int) -> nn.Module | None:
        """Build the trainable module that a layer needs for this memory; None by default."""
        return None

    def step_distance(self, capacity: int, pattern: Pattern) -> int:
        """Return the maximum distance, in tokens, to a visible slot of a cache with ``capacity`` slots."""
        return min(capacity - 1, pattern.max_distance)

    def cache(self, state: State, capacity: int, layers: Sequence[Any], tables: DistanceTables) -> KVCache:
        """Create the KV cache for acting from a state, with the current weights.

        Args:
            state: memory state of M tokens.
            capacity: number of slots S, at least M.
            layers: layer of each pass, a `Block`.
            tables: tables of the distances from `step_distance` down to 0.
        """
        slots = state.padded(capacity)
        buffers = [layer.cache(h, slots.index, tables) for layer, h in zip(layers, slots.hidden, strict=True)]
        return KVCache(buffers, slots.index, state.index.shape[1] % capacity, tables)

    def view(self, state: State | None, index: TokenIndex, layers: Sequence[Any]) -> MemoryView:
        """Create the view of a state for a segment.

        Args:
            state: memory state; None for no memory.
            index: (B, T), positions and episodes of the segment's tokens.
            layers: layer of each pass, a `Block`.
        """
        return MemoryView(state, index)

    def __call__(self, state: State, hidden: Tensor, index: TokenIndex) -> State:
        """Return the state after a segment: the last M tokens of old state and segment, without gradient.

        Args:
            state: state before the segment.
            hidden: (L, B, T, C), inputs of each layer.
            index: (B, T), positions and episodes of the segment's tokens.
        """
        new = State(hidden.detach(), index).last(self.length)
        return concatenate_states([state.last(self.length - new.index.shape[1]), new])


class NoMemory(Memory):
    """No memory: the state has no tokens, and a segment attends to its own only."""

    length = 0
