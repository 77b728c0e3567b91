"""Transformer-XL memory with attention sinks: the first tokens of the episode, and the last ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlxf.attention.attention import LayerCache
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.cache import KVCache
from rlxf.attention.memory.base import Memory, MemoryView, State, extend_masks
from rlxf.attention.patterns.attention_sinks import AttentionSinks
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.recurrent.base import EpisodeRuns, MixerState
from rlxf.attention.relative import DistanceTables
from rlxf.attention.technique import SpecView
from rlxf.attention.token_index import EMPTY, MISSING, TokenIndex, is_tracing, may_contain_true, selected_rows
from rlxf.utils.checks import check_int


@dataclass(frozen=True)
class StreamingXL(Memory):
    """`XL` memory of M tokens, and the first s tokens of the current episode: attention sinks.

    A query at position i attends to the keys j with ``i - j <= M`` and those with ``j < s``, whatever the
    length of the episode: the pattern ``AttentionSinks(M + 1, s)``. The size of the memory is constant. The
    first s inputs of each layer are part of the recurrent state (``State.recurrent``), so a rollout stores
    them at the starts of segments only; the last M inputs are stored as with `XL`. Acting step by step equals
    learning in segments of any length, as visibility depends on positions only. Sinks have no gradient once
    their segment is over.

    Distances are counted in the cache, as in the paper: a sink that has left the window is
    ``M + s - j`` tokens away, so relative positions never exceed M + s. This includes `RoPE`: scores depend
    on differences of angles, so those of sinks follow from queries that are rotated by their position in the
    cache, at most M + s. Encodings that are added to a token (`Sinusoidal`) use the position in the episode.

    Source: Xiao et al. 2023, arXiv:2309.17453, section 3.2 (StreamingLLM), which leaves the keys of sinks
    as they were computed; here all keys are projected with the current weights.

    Args:
        length: number of recent tokens M, at least 1.
        sinks: number of first tokens s, at least 1; 4 as in the paper.

    Raises:
        TypeError: if an option is not an int.
        ValueError: if an option is less than 1; in a spec, unless the pattern is `Full` and the kernel a
            softmax over all visible keys.
    """

    paper: ClassVar[str] = "Xiao et al. 2023, arXiv:2309.17453"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "(length + sinks) pairs per token"
    length: int = 128
    sinks: int = 4

    def __post_init__(self) -> None:
        check_int("StreamingXL memory length", self.length)
        check_int("StreamingXL sinks", self.sinks)

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless the pattern is `Full` and the kernel a softmax over all visible keys."""
        super().check(choices)
        self.check_full_pattern(choices)
        self.check_full_softmax(choices)

    @property
    def largest_distance(self) -> int:
        """Largest distance in the cache, from a query to the first sink: M + s."""
        return self.length + self.sinks

    def visible_pattern(self, pattern: Pattern) -> Pattern:
        return AttentionSinks(self.length + 1, self.sinks)

    def covers(self, pattern: Pattern) -> bool:
        """Return True: the memory itself defines what is visible."""
        return True

    def check_recomputable(self) -> None:
        """Raise ValueError: the first tokens of an episode may be any number of steps ago."""
        raise ValueError(f"{self} keeps the first tokens of the episode")

    def step_distance(self, capacity: int, pattern: Pattern) -> int:
        return self.largest_distance

    def initial_carry(self, layers: int, batch: int, like: Tensor, width: int) -> MixerState:
        first = torch.zeros(batch, layers, self.sinks, width, dtype=like.dtype, device=like.device)
        return {"first": first, "known": first.new_zeros(batch, self.sinks, dtype=torch.bool)}

    def carry(self, state: MixerState, hidden: Tensor, runs: EpisodeRuns) -> MixerState:
        """Return the first tokens of the last episode, given the inputs hidden (L, B, T, C)."""
        early = runs.valid & (runs.position < self.sinks)
        if not may_contain_true(runs.reset | early):
            return state
        place = torch.where(early & (runs.number == runs.number[:, -1:]), runs.position, self.sinks)
        token = torch.arange(place.shape[1], device=place.device).expand_as(place)
        slots = token.new_full((len(place), self.sinks + 1), MISSING).scatter(1, place, token)[:, :-1]
        new = (
            hidden.detach()
            .transpose(0, 1)
            .gather(2, slots.clamp(min=0)[:, None, :, None].expand(-1, len(hidden), -1, hidden.shape[-1]))
        )
        written = slots != MISSING
        first = torch.where(written[:, None, :, None], new, state["first"])
        return {"first": first, "known": written | state["known"] & runs.continues[:, -1:]}

    def view(self, state: State | None, index: TokenIndex, layers: Sequence[Any]) -> "StreamingView":
        return StreamingView(state, index, self)

    def cache(
        self, state: State, capacity: int, layers: Sequence[Any], tables: DistanceTables
    ) -> "StreamingCache":
        """Create the KV cache for acting from a state; see `Memory.cache`. Slots of the sinks come first."""
        index, hidden = first_tokens(state, self)
        recent = state.padded(capacity)
        index = index.concatenate(recent.index)
        buffers = [
            layer.cache(torch.cat([first, h], dim=1), index, tables)
            for layer, first, h in zip(layers, hidden, recent.hidden, strict=True)
        ]
        slot = state.index.shape[1] % capacity
        return StreamingCache(buffers, index, slot, tables, self, layers)


def first_tokens(state: State, memory: StreamingXL) -> tuple[TokenIndex, Tensor]:
    """Return index (B, s) and inputs (L, B, s, C) of the sinks of a state; empty slots without any."""
    assert state.recurrent is not None
    known, episode = state.recurrent.memory["known"], state.recurrent.episode
    position = torch.arange(memory.sinks, device=known.device).expand_as(known)
    index = TokenIndex(position, torch.where(known, episode[:, None], EMPTY))
    return index, state.recurrent.memory["first"].transpose(0, 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamingMask(AttentionMask):
    """`AttentionMask` whose first keys are copies of the sinks.

    A copy is hidden if its original is also among the keys.

    Args:
        memory: memory technique, which defines the visible tokens.
        copies: number of keys that are copies.
    """

    memory: StreamingXL
    copies: int

    @cached_property
    def distance(self) -> Tensor:
        """Distance of each pair in the cache, (B, Tq, Tk): at most M + s - j for a sink j."""
        j = self.key.position[:, None, :]
        is_sink = self._is_sink[:, None, :]
        i = torch.where(is_sink, self.query_in_memory[:, :, None], self.query.position[:, :, None])
        return i - j

    @property
    def query_in_memory(self) -> Tensor:
        """Position of each query in the cache, (B, Tq): at most M + s."""
        return self.query.position.clamp(max=self.memory.largest_distance)

    @cached_property
    def moved_keys(self) -> Tensor | None:
        """The sinks, (B, Tk) bool; None if all of them are still next to the window of each query."""
        far = may_contain_true(self.query.position > self.memory.largest_distance)
        return self._is_sink if far else None

    @property
    def _is_sink(self) -> Tensor:
        return self.key.position < self.memory.sinks

    @cached_property
    def aligned(self) -> bool:
        """Return whether distances are those of slots, which excludes pairs of a query and a far sink."""
        if is_tracing():
            return False
        i, j = self.query.position, self.key.position
        far = bool((i > self.memory.length).any()) and bool(
            ((j < self.memory.sinks) & (self.key.episode != EMPTY)).any()
        )
        return not far and super().aligned

    @cached_property
    def allowed_by_head(self) -> Tensor:
        i, j = self.query.position[:, :, None], self.key.position[:, None, :]
        visible = self.memory.visible_pattern(self.pattern).mask_mod(i, j) & ~self._duplicate[:, None]
        return super().allowed_by_head & visible[:, None]

    @cached_property
    def _duplicate(self) -> Tensor:
        """True for a copy whose original is among the keys, (B, Tk) bool."""
        copies, others = self.key.at(slice(self.copies)), self.key.at(slice(self.copies, None))
        present = (others.position[:, None] == copies.position[:, :, None]) & (
            others.episode[:, None] == copies.episode[:, :, None]
        )
        present = present.any(-1)
        return torch.cat([present, torch.zeros_like(others.episode, dtype=torch.bool)], dim=1)

    @property
    def sparse_plan(self) -> None:
        """None: attention is always dense."""
        return None


@dataclass(frozen=True, eq=False)
class StreamingView(MemoryView):
    """View of a `StreamingXL` memory for a segment: the sinks, the recent tokens, then the segment's tokens.

    Args:
        memory: memory technique, which defines the visible tokens.
    """

    memory: StreamingXL

    @cached_property
    def _first(self) -> tuple[TokenIndex, Tensor]:
        assert self.state is not None
        return first_tokens(self.state, self.memory)

    @property
    def _copies(self) -> int:
        return 0 if self.state is None else self.memory.sinks

    @property
    def key(self) -> TokenIndex:
        return super().key if self.state is None else self._first[0].concatenate(super().key)

    def adapt_masks(self, masks: Sequence[AttentionMask]) -> Sequence[AttentionMask]:
        return extend_masks(StreamingMask, masks, memory=self.memory, copies=self._copies)

    def tokens(self, pass_index: int, x: Tensor) -> Tensor | None:
        if self.state is None:
            return None
        return torch.cat([self._first[1][pass_index], self.state.hidden[pass_index]], dim=1)

    def weights_by_token(self, pass_index: int, weights: Tensor) -> Tensor:
        """Return the weights over tokens of state and segment, without those of the copies of the sinks."""
        return weights[..., self._copies :]


@dataclass(frozen=True, eq=False)
class SinkPlan:
    """Sinks among the tokens of one step.

    Args:
        rows: (R,) int64, rows whose token is a sink.
        slots: (R,) int64, cache slots of the sinks.
        index: (R, 1), index of the sinks.
    """

    rows: Tensor
    slots: Tensor
    index: TokenIndex


@dataclass(eq=False)
class StreamingCache(KVCache):
    """`KVCache` whose first s slots hold the sinks; the others are the ring buffer of recent tokens.

    Args:
        memory: memory technique, which defines the visible tokens.
        layer_modules: layer of each pass.
        plan: sinks of the current step.
    """

    memory: StreamingXL
    layer_modules: Sequence[Any]
    plan: SinkPlan | None = None

    def adapt_masks(self, masks: Sequence[AttentionMask]) -> Sequence[AttentionMask]:
        return extend_masks(StreamingMask, masks, memory=self.memory, copies=self.memory.sinks)

    @property
    def fixed_slots(self) -> int:
        return self.memory.sinks

    def write(self, index: TokenIndex) -> int:
        """Store the index of the next token, if it is a sink also among the sinks, and return its slot.

        While tracing, every token counts as a sink. If it is none, it is written to its own slot twice.
        """
        slot = super().write(index)
        position, episode = index.position[:, 0], index.episode[:, 0]
        is_sink = (episode != EMPTY) & (position < self.memory.sinks)
        rows = selected_rows(is_sink)
        self.plan = SinkPlan(rows, torch.where(is_sink, position, slot)[rows], index.rows(rows))
        self.index.write(rows, self.plan.slots, self.plan.index)
        return slot

    def observe_input(self, pass_index: int, x: Tensor) -> None:
        """Store the keys and values of the inputs x (B, 1, C) of a pass that are sinks."""
        assert self.plan is not None
        plan, ring = self.plan, self.layers[pass_index]
        if not len(plan.rows) or not isinstance(ring, LayerCache):
            return
        k, v = self.layer_modules[pass_index].prepare_keys(x[plan.rows], plan.index)
        ring.write_rows(plan.rows, plan.slots, k, v)
