"""Transformer with memory tokens that are read and written segment by segment (RMT, RATE)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlxf.attention.attention import LayerCache
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.cache import Context, KVCache
from rlxf.attention.depth.base import ConfidenceFn, ExitOutputs
from rlxf.attention.input_checks import check_step
from rlxf.attention.layer_stack import SegmentStack
from rlxf.attention.memory.base import State, extend_masks
from rlxf.attention.recurrent.base import RecurrentState
from rlxf.attention.relative import DistanceTables
from rlxf.attention.segments import EpisodeSegments, Memories, SegmentedCache, TokenGroupMask, segment_keys
from rlxf.attention.technique import SpecView
from rlxf.attention.token_index import EMPTY, MISSING, TokenIndex, check_tokens
from rlxf.attention.transformer import Transformer


@dataclass(frozen=True, eq=False)
class SegmentedRun:
    """Result of a call.

    Args:
        segments: division of the tokens into segments.
        outputs: outputs of all tokens, (B, T, F).
        memories: memory after the tokens.
        stacks: slots of the tokens of each part, (B, W), and its passes.
    """

    segments: EpisodeSegments
    outputs: Tensor
    memories: Memories
    stacks: list[tuple[Tensor, SegmentStack]]


class SegmentedTransformer(Transformer):
    """`Transformer` whose memory tokens are read and written segment by segment; see `RMT`.

    The tokens of a call are divided into the segments of their episodes, one after the other. Each segment is
    one pass of ``[memory ; tokens ; memory]``, with positions that count within the segment.
    """

    memory: Any  # an RMT

    def __init__(self, spec: SpecView):
        super().__init__(spec)
        self.memory_tokens = spec.memory.build_tokens(spec.width)

    def forward(
        self, x: Tensor, index: TokenIndex, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        if state is not None:
            self._check_finite_state(state, len(x))
        run = self._run(x, index, state, context)
        return run.outputs, self._state_after(run, state, index)

    @torch.no_grad()
    def next_state(
        self, x: Tensor, index: TokenIndex, state: State | None = None, context: Context | None = None
    ) -> State:
        return self._state_after(self._run(x, index, state, context), state, index)

    def _state_after(self, run: SegmentedRun, state: State | None, index: TokenIndex) -> State:
        state = state or self.initial_state(len(index.episode))
        after = self.memory(state, torch.stack(self._hidden(run)), index)
        return replace(after, recurrent=run.memories.state(_recurrent(state)))

    def encode(
        self,
        x: Tensor,
        index: TokenIndex,
        state: State | None = None,
        context: Context | None = None,
        output_slice: slice | None = None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        run = self._run(x, index, state, context)
        return run.outputs[:, output_slice or slice(None)], self._hidden(run)

    def _hidden(self, run: SegmentedRun) -> list[Tensor]:
        """Return the inputs of each pass for all tokens, (B, T, C) each."""
        return self._in_order(run.segments, [passes.hidden for _, passes in run.stacks])

    def outputs(
        self,
        x: Tensor,
        index: TokenIndex,
        state: State | None = None,
        context: Context | None = None,
        output_slice: slice | None = None,
    ) -> Tensor:
        return self._run(x, index, state, context).outputs[:, output_slice or slice(None)]

    def exits(
        self,
        x: Tensor,
        index: TokenIndex,
        state: State | None = None,
        context: Context | None = None,
        output_slice: slice | None = None,
    ) -> ExitOutputs:
        """Return the outputs of the last pass: the depth is fixed."""
        run = self._run(x, index, state, context, self._output_and_stream)
        y, stream = run.outputs[None, :, output_slice or slice(None)].chunk(2, dim=-1)
        return ExitOutputs(y, y.new_ones(1), stream)

    def _output_and_stream(self, stream: Tensor) -> Tensor:
        return torch.cat([self._output(stream), self.spec.residual.attention_input(stream)], dim=-1)

    @torch.no_grad()
    def early_outputs(
        self,
        x: Tensor,
        index: TokenIndex,
        state: State | None = None,
        output_slice: slice | None = None,
        confidence_fn: ConfidenceFn | None = None,
    ) -> Tensor:
        return self.outputs(x, index, state, None, output_slice)

    def _run(
        self,
        x: Tensor,
        index: TokenIndex,
        state: State | None,
        context: Context | None,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> SegmentedRun:
        """Process the segments in order.

        ``finish`` maps residual streams to outputs (..., C) and further features; None for outputs alone.
        """
        check_tokens(x, index, self.spec.width)
        self._project(context)
        if state is None:
            state = self.initial_state(len(x))
        self._check_state(state, len(x))
        memories = Memories.of(_recurrent(state))
        segments = self._segments(index, state)
        outputs: list[list[Tensor]] = []
        stacks: list[tuple[Tensor, SegmentStack]] = []
        for number in segments.used:
            slots, first = segments.slots[number], segments.offsets[number]
            memories = memories.at(index.gather(slots).newest())
            past = self._unfinished(state, memories.last) if number == 0 else None
            y, passes, memories = self._segment(x, slots, first, past, memories, finish or self._output)
            outputs.append([y])
            stacks.append((slots, passes))
        (y,) = self._in_order(segments, outputs)
        return SegmentedRun(segments, y, memories, stacks)

    def _segments(self, index: TokenIndex, state: State) -> EpisodeSegments:
        """Divide tokens at an index (B, T) after a state."""
        last = Memories.of(_recurrent(state)).last
        return EpisodeSegments.of(index, last, self.memory.segment_length)

    def by_token(self, values: Sequence[Tensor], index: TokenIndex, state: State | None) -> list[Tensor]:
        segments = self._segments(index, state or self.initial_state(len(index.episode)))
        passes = len(values) // len(segments.used)
        return self._in_order(segments, [values[n : n + passes] for n in range(0, len(values), passes)])

    def _in_order(self, segments: EpisodeSegments, by_part: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return values of all tokens, (B, T, F) each, given those of each part with its memory tokens."""
        slices = [self._token_slice(segments.slots[number]) for number in segments.used]
        return [
            segments.in_order([x[:, tokens] for x, tokens in zip(parts, slices, strict=True)])
            for parts in zip(*by_part, strict=True)
        ]

    def _unfinished(self, state: State, last: TokenIndex) -> State | None:
        """Return the state's tokens in the segment of ``last`` (B, 1), at local positions; None for none."""
        keys = segment_keys(state.index, self.memory.segment_length)
        inside = (keys == segment_keys(last, self.memory.segment_length)) & (keys != EMPTY)
        return State(state.hidden, self._local(state.index, inside)) if bool(inside.any()) else None

    def _local(self, index: TokenIndex, filled: Tensor) -> TokenIndex:
        """Return the index in a segment, after its read tokens, of the tokens ``filled`` (B, T) bool."""
        offset = index.position % self.memory.segment_length
        return TokenIndex(self.memory.tokens + offset, torch.where(filled, 0, EMPTY))

    def _segment(
        self,
        x: Tensor,
        slots: Tensor,
        first: int,
        past: State | None,
        memories: Memories,
        finish: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, SegmentStack, Memories]:
        """Process one segment of each row.

        Args:
            x: all tokens, (B, T, C).
            slots: (B, W), slots of the segment's tokens; `MISSING` for none.
            first: offset of the first column in the segment.
            past: earlier tokens of the segment; None for none.
            memories: memory before the segment.
            finish: function from residual streams to outputs.

        Returns:
            Outputs (B, m + W, F) or (B, m + W + m, F), the passes, and the memory after the segment.
        """
        size, count, width = self.memory.segment_length, self.memory.tokens, slots.shape[1]
        tokens = x.gather(1, slots.clamp(min=0)[..., None].expand(-1, -1, x.shape[-1]))
        filled = slots != MISSING
        whole = filled[:, -1] if width and first + width == size else filled.new_zeros(len(x))
        read = memories.read(self.memory_tokens.start)
        position = torch.arange(count + first, count + first + width, device=x.device).expand_as(slots)
        local = TokenIndex(position, torch.where(filled, 0, EMPTY))
        parts, full = [read, tokens], self._memory_index(0, filled.any(1)).concatenate(local)
        if write := bool(whole.any()):
            parts, full = [*parts, read], full.concatenate(self._memory_index(count + size, whole))
        stream, passes = self._run_layers(torch.cat(parts, dim=1), full, past)
        y = finish(stream)
        if write:
            new = y[:, self._token_slice(slots).stop :, : x.shape[-1]]
            memories = memories.write(whole, self.memory_tokens.update(read, new))
        return y, passes, memories

    def _run_layers(self, x: Tensor, index: TokenIndex, past: State | None) -> tuple[Tensor, SegmentStack]:
        """Return the residual stream after all layers, for tokens of a segment at local positions."""
        stream, passes = self._begin_checked(x, index, past, None, None, [])
        return self.depth(stream, passes), passes

    def _token_slice(self, slots: Tensor) -> slice:
        """Return the place of a segment's tokens at slots (B, W), between the memory tokens."""
        return slice(self.memory.tokens, self.memory.tokens + slots.shape[1])

    def weights(
        self, x: Tensor, index: TokenIndex, state: State | None, context: Context | None
    ) -> list[Tensor]:
        run = self._run(x, index, state, context)
        memory = 0 if state is None else state.index.shape[1]
        shape = len(x), self.spec.heads, index.shape[1] + 1, memory + index.shape[1] + 1
        weights = [x.new_zeros(shape) for _ in self.order]
        for slots, passes in run.stacks:
            past = passes.masks[0].key.shape[1] - passes.index.shape[1]
            earlier = torch.arange(past, device=x.device).expand(len(x), -1)
            columns = torch.cat([earlier, torch.where(slots == MISSING, shape[3] - 1, memory + slots)], dim=1)
            for number, layer in enumerate(self.pass_layers):
                part = self._part_weights(number, layer, passes, past, self._token_slice(slots))
                rows = torch.where(slots == MISSING, shape[2] - 1, slots)[:, None, :, None]
                place = rows * shape[3] + columns[:, None, None]
                place = place.expand(-1, part.shape[1], -1, -1).flatten(2)
                weights[number].flatten(2).scatter_add_(2, place, part.flatten(2))
        return [w[:, :, :-1, :-1] for w in weights]

    def _part_weights(self, number: int, layer: Any, passes: SegmentStack, past: int, place: slice) -> Tensor:
        """Return the weights of a segment's tokens over earlier ones and themselves, (B, H, W, P + W)."""
        x = passes.hidden[number]
        full = layer.weights(x, passes.view.tokens(number, x), passes.masks[number])[:, :, place]
        return torch.cat([full[..., :past], full[..., past + place.start : past + place.stop]], dim=-1)

    def _memory_index(self, first: int, rows: Tensor) -> TokenIndex:
        """Return the index (B, m) of memory tokens from position ``first``; rows (B,) bool have them."""
        position = first + torch.arange(self.memory.tokens, device=rows.device).expand(len(rows), -1)
        return TokenIndex(position, torch.where(rows, 0, EMPTY)[:, None].expand_as(position))

    def attention_masks(
        self, query: TokenIndex, key: TokenIndex, tables: DistanceTables | None = None
    ) -> list[AttentionMask]:
        masks = super().attention_masks(query, key, tables)
        if self.memory.mask == "causal" or tables is not None:
            return masks
        groups = {"first": self.memory.tokens, "last": self.memory.tokens + self.memory.segment_length}
        return list(extend_masks(TokenGroupMask, masks, **groups))

    # Acting.

    @torch.no_grad()
    def cache(self, state: State, capacity: int, context: Context | None = None) -> "SegmentedCache":
        """Create a KV cache; see `Transformer.cache`. Its first m slots hold the memory tokens."""
        self._check_cache(state, capacity)
        self._project(context)
        count, (batch, length) = self.memory.tokens, state.index.shape
        memories = Memories.of(_recurrent(state))
        none = State(state.hidden, TokenIndex.empty(batch, length, state.hidden.device))
        past = self._unfinished(state, memories.last) or none
        ring = past.padded(max(capacity, self.memory.segment_length))
        index = TokenIndex.range(batch, count, 0, state.hidden.device).concatenate(ring.index)
        tables = self._step_tables(self.memory.positions)
        keys = self._read_inputs(memories.read(self.memory_tokens.start))
        layers: Any = [
            layer.cache(torch.cat([m, h], dim=1), index, tables)
            for layer, m, h in zip(self.pass_layers, keys, ring.hidden, strict=True)
        ]
        inputs, filled = self._by_offset(past)
        slot = length % ring.index.shape[1]
        cache = SegmentedCache(layers, index, slot, tables, count, memories, inputs, filled)
        cache.recurrent = memories.state(_recurrent(state))
        return cache

    def _by_offset(self, past: State) -> tuple[Tensor, Tensor]:
        """Arrange the inputs of an unfinished segment by offset: (L, B, S, C), and which exist, (B, S)."""
        size, (layers, batch, _, width) = self.memory.segment_length, past.hidden.shape
        place = torch.where(past.index.episode == EMPTY, size, past.index.position - self.memory.tokens)
        filled = torch.zeros(batch, size + 1, dtype=torch.bool, device=place.device).scatter(1, place, True)
        slots = place[None, ..., None].expand(layers, -1, -1, width)
        inputs = past.hidden.new_zeros(layers, batch, size + 1, width).scatter(2, slots, past.hidden)
        return inputs[:, :, :-1].contiguous(), filled[:, :-1].contiguous()

    def _read_inputs(self, tokens: Tensor) -> list[Tensor]:
        """Return the inputs of each pass for memory tokens (B, m, C)."""
        index = TokenIndex.range(len(tokens), self.memory.tokens, 0, tokens.device)
        _, passes = self._run_layers(tokens, index, None)
        return list(passes.hidden)

    @torch.no_grad()
    def step(self, x: Tensor, index: TokenIndex, cache: KVCache) -> tuple[Tensor, Tensor]:
        check_step(x, index, cache, self.spec.width)
        assert isinstance(cache, SegmentedCache)
        self._enter_segment(index, cache)
        size = self.memory.segment_length
        here = index.episode != EMPTY
        offset = index.position[:, 0] % size
        stream, passes = self._begin_step(x, self._local(index, here), cache)
        y = self._output(self.depth(stream, passes))
        hidden = torch.cat(list(passes.hidden), dim=1).transpose(0, 1)
        cache.add(here[:, 0], offset, hidden)
        self._write(here[:, 0] & (offset == size - 1), cache)
        cache.recurrent = cache.memories.state(_recurrent(cache))
        return y[:, 0], hidden

    @torch.no_grad()
    def early_step(
        self, x: Tensor, index: TokenIndex, cache: KVCache, confidence_fn: ConfidenceFn | None = None
    ) -> Tensor:
        return self.step(x, index, cache)[0]

    def _enter_segment(self, index: TokenIndex, cache: "SegmentedCache") -> None:
        """Clear the segment of rows whose next token begins a new one; a new episode has no memory."""
        size = self.memory.segment_length
        before = cache.memories
        here = index.episode != EMPTY
        other = (segment_keys(index, size) != segment_keys(before.last, size)) & here
        cache.clear(other[:, 0].nonzero()[:, 0])
        cache.memories = before.at(index)
        self._refresh((before.written & ~cache.memories.written).nonzero()[:, 0], cache)

    def _write(self, whole: Tensor, cache: "SegmentedCache") -> None:
        """Write the memory of rows (B,) bool whose segment is complete."""
        rows = whole.nonzero()[:, 0]
        if not len(rows):
            return
        size, count = self.memory.segment_length, self.memory.tokens
        read = cache.memories.read(self.memory_tokens.start)[rows]
        local = TokenIndex.range(len(rows), size, count, read.device)
        filled = TokenIndex(local.position, torch.where(cache.filled[rows], 0, EMPTY))
        everywhere = whole[rows]
        index = self._memory_index(0, everywhere).concatenate(self._memory_index(count + size, everywhere))
        past = State(cache.inputs[:, rows], filled)
        stream, _ = self._run_layers(torch.cat([read, read], dim=1), index, past)
        new = self.memory_tokens.update(read, self._output(stream)[:, count:])
        tokens = cache.memories.tokens.index_copy(0, rows, new.to(cache.memories.tokens.dtype))
        cache.memories = cache.memories.write(whole, tokens)
        self._refresh(rows, cache)

    def _refresh(self, rows: Tensor, cache: "SegmentedCache") -> None:
        """Compute the keys and values of the memory tokens of rows (R,) again."""
        if not len(rows):
            return
        count = self.memory.tokens
        inputs = self._read_inputs(cache.memories.read(self.memory_tokens.start)[rows])
        index = cache.index.rows(rows).at(slice(count))
        for layer, ring, h in zip(self.pass_layers, cache.layers, inputs, strict=True):
            assert isinstance(ring, LayerCache)
            k, v = layer.prepare_keys(h, index)  # type: ignore[operator]
            ring.keys[rows, :, :count], ring.values[rows, :, :count] = k, v


def _recurrent(owner: State | KVCache) -> RecurrentState:
    """Return the recurrent state of a state or cache with memory tokens."""
    assert owner.recurrent is not None
    return owner.recurrent
