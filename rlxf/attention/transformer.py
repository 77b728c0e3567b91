"""Transformer module: processes segments for training and single tokens for acting."""

from collections.abc import MutableSequence, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlxf.attention.attention_mask import AttentionMask, DistanceTables
from rlxf.attention.cache import KVCache
from rlxf.attention.depth.base import ConfidenceFn, DepthController
from rlxf.attention.depth.early_exit import EarlyExitController, ExitDepth, ExitOutputs
from rlxf.attention.encoder_context import Context, ProjectedContext
from rlxf.attention.global_attention import LearnedGlobalTokens, NoGlobalTokens
from rlxf.attention.kernels.base import AttentionKernel, Kernel, RecurrentKernel
from rlxf.attention.layer import Block
from rlxf.attention.layer_stack import LayerStack, SegmentStack, StepStack, discarded_inputs
from rlxf.attention.memory.base import MemoryView, State
from rlxf.attention.memory.compressive import Compressive
from rlxf.attention.memory.compressive_cache import CompressiveCache
from rlxf.attention.memory.knn import KNN
from rlxf.attention.memory.knn_cache import KNNCache
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.patterns.etc import ExtraTokens
from rlxf.attention.patterns.full import Full
from rlxf.attention.patterns.window import limit_distance
from rlxf.attention.positions.base import PairwisePosition, PositionEmbedding
from rlxf.attention.residuals.reversible import Reversible
from rlxf.attention.reversible_stack import ReversibleStack
from rlxf.attention.token_index import TokenIndex

if TYPE_CHECKING:
    from rlxf.attention.spec import TransformerSpec


class Transformer(nn.Module):
    """Transformer that a `TransformerSpec` describes; created by `TransformerSpec.build`.

    `forward` maps a segment of T tokens and a memory state to outputs and the next state. `step` maps
    one token and a `KVCache` to an output. Both compute the same outputs, so acting equals learning.
    """

    def __init__(self, spec: "TransformerSpec"):
        super().__init__()
        self.spec = spec
        self.embedding = (
            spec.position.build_embedding(spec.width, spec.heads) if spec.position else PositionEmbedding()
        )
        self.global_token_embedding = _extra_tokens(spec)
        self.order = [spec.depth.layer_of_pass(number) for number in range(spec.layers)]
        layers = (_of_layer(spec, *each) for each in enumerate(spec.kernel.for_layers(spec.kinds)))
        self.blocks: Sequence[Block] = nn.ModuleList(Block(layer) for layer in layers)  # type: ignore
        self.depth = spec.depth.build(spec.width, spec.layers)
        first, *others = self._kernels()
        for kernel in others:
            kernel.tie_weights(first)
        if (
            isinstance(self.global_token_embedding, LearnedGlobalTokens)
            and self.order.count(self.order[-1]) == 1
        ):
            self.blocks[-1].drop_global_attention()
        self.norm = nn.LayerNorm(spec.width) if spec.final_norm else nn.Identity()
        self._penalty_inputs: tuple[MemoryView, Sequence[Tensor]] | None = None

    def forward(
        self, x: Tensor, index: TokenIndex, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        """Compute the outputs of a segment and the next memory state.

        Args:
            x: tokens, (B, T, C).
            index: their positions and episodes, (B, T).
            state: memory of the tokens before the segment; None for no memory.
            context: encoder output for cross-attention; None without it.

        Returns:
            The outputs (B, T, C), and the state after the segment: None without memory. Outputs
            at empty slots are undefined.

        Raises:
            ValueError: if a context is given without cross-attention, or missing with it.
        """
        if self.spec.memory is None:
            return self.outputs(x, index, state, context), None
        y, hidden = self.encode(x, index, state, context)
        return y, self._next_state(state, hidden, index)

    @torch.no_grad()
    def next_state(
        self, x: Tensor, index: TokenIndex, state: State | None = None, context: Context | None = None
    ) -> State:
        """Return only the next state of `forward`, for a transformer with memory.

        The last layer computes a single token, which saves time. Arguments are those of `forward`.
        """
        _, hidden = self.encode(x, index, state, context, wanted=slice(-1, None))
        return self._next_state(state, hidden, index)

    def _next_state(self, state: State | None, hidden: Sequence[Tensor], index: TokenIndex) -> State:
        """Compute the state after a segment from the inputs of each layer (B, T, C)."""
        assert self.spec.memory is not None
        state = state or self.initial_state(len(index.episode))
        return self.spec.memory(state, torch.stack(list(hidden)), index)

    def encode(
        self,
        x: Tensor,
        index: TokenIndex,
        state: State | None = None,
        context: Context | None = None,
        wanted: slice | None = None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the outputs and the inputs of each layer, (B, T, C) each.

        Args:
            x: see `forward`.
            index: see `forward`.
            state: see `forward`.
            context: see `forward`.
            wanted: tokens whose outputs are computed by the last layer and returned; None for all.
        """
        x, passes = self._begin(x, index, state, context, wanted, [])
        return self._output(self.depth(x, passes)), passes.hidden

    def outputs(
        self,
        x: Tensor,
        index: TokenIndex,
        state: State | None = None,
        context: Context | None = None,
        wanted: slice | None = None,
    ) -> Tensor:
        """Return only the outputs of `encode`. The inputs of layers are not stored."""
        x, passes = self._begin(x, index, state, context, wanted, discarded_inputs())
        return self._output(self.depth(x, passes))

    def exits(
        self,
        x: Tensor,
        index: TokenIndex,
        state: State | None = None,
        context: Context | None = None,
        wanted: slice | None = None,
    ) -> ExitOutputs:
        """Return the outputs after each pass, for training early exits. Arguments are those of `encode`.

        Only the last output is returned unless the depth technique supports early exits.
        """
        x, passes = self._begin(x, index, state, context, wanted, discarded_inputs())
        if not isinstance(self.depth, EarlyExitController):
            stream = self.depth(x, passes)
            y = self._output(stream)[None]
            return ExitOutputs(y, y.new_ones(1), passes.attention_input(stream)[None])
        assert isinstance(self.spec.depth, ExitDepth)
        opening, streams = self.depth.initial_features(x, passes), self.depth.all_outputs(x, passes)
        outputs = torch.stack([self._output(stream) for stream in streams])
        states = torch.stack([passes.attention_input(stream) for stream in streams])
        shares = self.spec.depth.loss_weights(len(streams)).to(outputs)
        return ExitOutputs(outputs, shares, states, partial(self.depth.auxiliary_loss, opening, states))

    @torch.no_grad()
    def early_outputs(
        self,
        x: Tensor,
        index: TokenIndex,
        state: State | None = None,
        wanted: slice | None = None,
        judge: ConfidenceFn | None = None,
    ) -> Tensor:
        """Return outputs of a segment with early exits, (B, Tq, C), for acting.

        The final stream of a token that exits is copied to later passes, where other tokens attend to it.

        Args:
            x: see `encode`.
            index: see `encode`.
            state: see `encode`.
            wanted: see `encode`.
            judge: confidence of the outputs, for a depth technique that uses one.
        """
        x, passes = self._begin(x, index, state, None, wanted, discarded_inputs())
        return self._output(self._run_early(x, passes, judge))

    def _begin(
        self,
        x: Tensor,
        index: TokenIndex,
        state: State | None,
        context: Context | None,
        wanted: slice | None,
        hidden: MutableSequence[Tensor],
    ) -> tuple[Tensor, SegmentStack]:
        """Return the residual stream of a segment and its passes; ``hidden`` receives the passes' inputs."""
        seen = self._project(context)
        x, index, wanted = self.embed(x, index, wanted)
        recall = self.memory_view(state, index)
        passes = self._passes(
            embedding=self.embedding,
            residual=self.spec.residual,
            blocks=self._layers,
            index=index,
            masks=recall.adapt_masks(self.attention_masks(index, recall.key)),
            seen=seen,
            cross_mask=self._across(index, seen),
            recall=recall,
            wanted=wanted,
            hidden=[] if recall.has_penalty else hidden,
        )
        if torch.is_grad_enabled():
            self._prepare_penalty(recall if recall.has_penalty else None, passes)
        return self.spec.residual.init_stream(x), passes

    @torch.no_grad()
    def step(self, x: Tensor, index: TokenIndex, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Compute the output of one token per row and update the cache, without gradient.

        Args:
            x: tokens, (B, C).
            index: (B, 1), their positions and episodes. Positions of an episode must be consecutive.
            cache: KV cache, updated in place.

        Returns:
            The outputs (B, C), and the inputs of each layer (L, B, C), from which a state can be built.
        """
        stream, passes = self._begin_step(x, index, cache)
        y = self._output(self.depth(stream, passes))
        return y[:, 0], torch.cat(list(passes.hidden), dim=1).transpose(0, 1)

    @torch.no_grad()
    def early_step(
        self, x: Tensor, index: TokenIndex, cache: KVCache, judge: ConfidenceFn | None = None
    ) -> Tensor:
        """Run `step` with early exits and return only the outputs (B, C).

        Args:
            x: see `step`.
            index: see `step`.
            cache: see `step`.
            judge: see `early_outputs`.

        Raises:
            ValueError: if the depth technique decides about exits by whole sequences.
        """
        depth = self.spec.depth
        if isinstance(depth, ExitDepth) and not depth.exits_token_by_token:
            raise ValueError(
                f"{depth} decides about exits by the mean of a sequence and cannot run single steps; "
                f"use `early` on segments"
            )
        stream, passes = self._begin_step(x, index, cache)
        return self._output(self._run_early(stream, passes, judge))[:, 0]

    def _begin_step(self, x: Tensor, index: TokenIndex, cache: KVCache) -> tuple[Tensor, StepStack]:
        """Return the residual stream of one token per row, (B, 1, C), and its passes."""
        slot = cache.write(index)
        passes = StepStack(
            embedding=self.embedding,
            residual=self.spec.residual,
            blocks=self._layers,
            index=index,
            masks=cache.adapt_masks(self.attention_masks(index, cache.index, cache.tables)),
            seen=cache.context,
            cross_mask=self._across(index, cache.context),
            cache=cache,
            slot=slot,
        )
        return self.spec.residual.init_stream(self.embedding(x[:, None], index.position)), passes

    def initial_state(self, batch: int) -> State:
        """Return an empty state for ``batch`` rows; its length is 0 without memory."""
        sizes = batch, next(self.parameters()), self.spec.width
        if self.spec.memory is None:
            return State.empty(self.spec.layers, batch, 0, *sizes[1:])
        return self.spec.memory.empty(self.spec.layers, *sizes)

    @torch.no_grad()
    def cache(self, state: State, capacity: int, context: Context | None = None) -> KVCache:
        """Create a KV cache from a memory state with the current weights.

        Args:
            state: memory state; `initial_state` at the start.
            capacity: number of tokens S in the cache, including the current one; at least the state's length.
                With ``Window(M + 1)`` and ``XL(M)``, M + 1 tokens suffice if no
                empty slot lies inside an episode: the window counts positions, the ring buffer counts slots.
                With the pattern `Full` and a `RecurrentKernel` the capacity has no effect: a step attends to
                its whole episode from the first token in the state, at constant cost.
                With `Compressive` memory the memory defines the visible tokens. Capacity beyond the state's
                length plus 1 makes room for empty slots inside an episode.
            context: encoder output for cross-attention; None without it.

        Raises:
            ValueError: if the state does not fit the capacity, or the transformer is not causal.
        """
        length = state.index.shape[1]
        if not self.spec.causal:
            raise ValueError("only a causal transformer can act token by token; set causal=True")
        if capacity < max(1, length):
            raise ValueError(f"capacity must be at least the state's length {length}, got {capacity}")
        if self._recurrent:
            return self._recurrent_cache(state, context)
        if isinstance(self.spec.memory, Compressive):
            return self._compressive_cache(self.spec.memory, state, capacity, context)
        tables = self._step_tables(min(capacity - 1, self.spec.pattern.max_distance))
        layers, batch = state.hidden.shape[:2]
        free = State.empty(layers, batch, capacity - length, state.hidden, self.spec.width)
        index = state.index.concatenate(free.index)
        hidden = torch.cat([state.hidden, free.hidden], dim=2)
        buffers = [block.cache(h, index, tables) for block, h in zip(self._layers, hidden, strict=True)]
        near = KVCache(buffers, index, length % capacity, tables, self._project(context))
        if isinstance(self.spec.memory, KNN):
            number = self.spec.memory.number(layers)
            return KNNCache.from_state(near, self._layers[number], self.spec.memory, state)
        return near

    def _compressive_cache(
        self, memory: Compressive, state: State, capacity: int, context: Context | None
    ) -> CompressiveCache:
        layers: Any = self._layers  # blocks implement the protocol of compressing layers
        tables = self._step_tables(memory.max_distance)
        return CompressiveCache.from_state(memory, layers, state, capacity, tables, self._project(context))

    def _step_tables(self, max_distance: int) -> DistanceTables:
        """Compute the distance tables for steps, from ``max_distance`` down to 0."""
        distances = torch.arange(max_distance, -1, -1, device=next(self.parameters()).device)
        return DistanceTables(distances, self.embedding.table(distances, self.spec.causal))

    def _run_early(self, x: Tensor, passes: LayerStack, judge: ConfidenceFn | None) -> Tensor:
        """Run the passes with early exits and return the stream of each token at its exit."""
        return self.depth.early_exit(x, passes, None if judge is None else lambda s: judge(self._output(s)))

    def _output(self, stream: Tensor) -> Tensor:
        """Compute the output (..., C) from the residual stream."""
        y: Tensor = self.norm(self.spec.residual.output(stream))
        return y

    def _passes(self, **kwargs: Any) -> SegmentStack:
        """Create the passes of a segment; reversible ones if the residual allows it and gradients are on."""
        if isinstance(self.spec.residual, Reversible) and torch.is_grad_enabled():
            return ReversibleStack(**kwargs)
        return SegmentStack(**kwargs)

    @property
    def _layers(self) -> list[Block]:
        """Layer of each pass."""
        return [self.blocks[layer] for layer in self.order]

    @property
    def _recurrent(self) -> bool:
        """Return whether acting uses kernel states: the kernel is recurrent and all patterns are `Full`."""
        patterns = {self.spec.pattern.for_layer(layer) for layer in range(self.spec.layers)}
        return patterns == {Full()} and isinstance(self.spec.kernel, RecurrentKernel)

    def _recurrent_cache(self, state: State, context: Context | None) -> KVCache:
        """Create a cache of recurrent kernel states, with one slot for the current token."""
        memories = [
            block.recurrent_state(h, state.index) for block, h in zip(self._layers, state.hidden, strict=True)
        ]
        index = TokenIndex.empty(state.index.shape[0], 1, state.hidden.device)
        tables = DistanceTables(torch.zeros(1, dtype=torch.long, device=state.hidden.device), None)
        return KVCache(memories, index, 0, tables, self._project(context))

    def penalty(self) -> Tensor | None:
        """Return the auxiliary loss of depth, kernels and memory for the last forward; None for none."""
        parts: list[DepthController | AttentionKernel] = [self.depth, *self._kernels()]
        terms = [*(part.penalty() for part in parts), self._memory_penalty()]
        present = [term for term in terms if term is not None]
        return torch.stack(present).sum() if present else None

    def _prepare_penalty(self, recall: MemoryView | None, passes: SegmentStack) -> None:
        """Make `penalty` refer to the given passes instead of earlier ones."""
        self._penalty_inputs = None if recall is None else (recall, passes.hidden)
        for kernel in self._kernels() if self.spec.kernel.loss_depends_on_tokens else ():
            kernel.reset_penalty()

    def _memory_penalty(self) -> Tensor | None:
        """Return the auxiliary loss of memory once per forward; None afterwards."""
        inputs, self._penalty_inputs = self._penalty_inputs, None
        return None if inputs is None else inputs[0].penalty(inputs[1])

    def mean_depth(self) -> Tensor | None:
        """Return the mean number of passes per token in the last forward; None if the depth is fixed."""
        return self.depth.mean_depth()

    def acting_depth(self) -> Tensor | None:
        """Return the mean number of passes per token over all early-exit calls since the last query.

        None if there was no such call, or if the depth is fixed.
        """
        return self.depth.mean_acting_depth()

    def after_update(self) -> None:
        """Notify the kernels that the weights have changed. Call it before the next forward or cache."""
        for kernel in self._kernels():
            kernel.after_update()

    def skip_update(self) -> None:
        """Notify the kernels that no update follows the last forward. Call it instead of `after_update`."""
        for kernel in self._kernels():
            kernel.skip_update()

    def _kernels(self) -> list[AttentionKernel]:
        return [module for module in self.modules() if isinstance(module, AttentionKernel)]

    def embed(
        self, x: Tensor, index: TokenIndex, wanted: slice | None = None
    ) -> tuple[Tensor, TokenIndex, slice | None]:
        """Embed tokens (B, T, C) and prepend the global tokens of the pattern, if it has any.

        Returns:
            The input of the first layer, the index of all tokens, and ``wanted`` as a slice of all tokens.
        """
        x, full_index = self.embedding(x, index.position), self.global_token_embedding.index(index)
        count = full_index.shape[1] - index.shape[1]
        wanted = _shift_slice(wanted, index.shape[1], count) if count else wanted
        return self.global_token_embedding(x, full_index), full_index, wanted

    def memory_view(self, state: State | None, index: TokenIndex) -> MemoryView:
        """Create the view of the memory for a segment with the given index (B, T)."""
        memory = self.spec.memory
        return MemoryView(state, index) if memory is None else memory.view(state, index, self._layers)

    def attention_mask(self, query: TokenIndex, key: TokenIndex) -> AttentionMask:
        """Return the attention mask of the first layer; tokens that memory compresses count as visible."""
        pattern, memory = self.spec.pattern.for_layer(0), self.spec.memory
        return self._relation(
            query, key, pattern if memory is None else memory.visible_pattern(pattern), None
        )

    def attention_masks(
        self, query: TokenIndex, key: TokenIndex, tables: DistanceTables | None = None
    ) -> list[AttentionMask]:
        """Return the attention mask of each pass; passes with the same pattern share one object."""
        patterns = [self.spec.pattern.for_layer(layer) for layer in range(self.spec.layers)]
        if tables is None:
            patterns = [self._bounded(*each) for each in zip(patterns, self._layers, strict=True)]
        masks = {pattern: self._relation(query, key, pattern, tables) for pattern in set(patterns)}
        return [masks[pattern] for pattern in patterns]

    @staticmethod
    def _bounded(pattern: Pattern, block: Block) -> Pattern:
        """Restrict a pattern to the distances at which the layer's kernel gives nonzero weights."""
        return limit_distance(pattern, block.attention.max_distance)

    def _relation(
        self, query: TokenIndex, key: TokenIndex, pattern: Pattern, tables: DistanceTables | None
    ) -> AttentionMask:
        dtype, spec = next(self.parameters()).dtype, self.spec
        # Only pairwise positions use distances.
        position = self.embedding if isinstance(spec.position, PairwisePosition) else None
        return AttentionMask(query, key, pattern, spec.causal, dtype, position, tables, heads=spec.heads)

    def _across(self, query: TokenIndex, seen: ProjectedContext | None) -> AttentionMask | None:
        dtype = next(self.parameters()).dtype
        return None if seen is None else AttentionMask(query, seen.index, Full(), False, dtype)

    def _project(self, context: Context | None) -> ProjectedContext | None:
        if (context is not None) != self.spec.cross_attention:
            article = "a" if context is not None else "no"
            raise ValueError(
                f"cross_attention is {self.spec.cross_attention}, but {article} context was given"
            )
        if context is None:
            return None
        layers = [block.cross.project(context.x) for block in self._layers if block.cross is not None]
        return ProjectedContext(layers, context.index)


def _of_layer(spec: "TransformerSpec", number: int, kernel: Kernel) -> "TransformerSpec":
    """Return the spec of one layer of a `Transformer`, with its own kernel and memory."""
    memory = spec.memory and spec.memory.for_layer(number, spec.layers)
    return replace(spec, kernel=kernel, memory=memory)


def _extra_tokens(spec: "TransformerSpec") -> NoGlobalTokens:
    """Build the global tokens of the pattern. Causal models have none: they could see only the future."""
    if isinstance(spec.pattern, ExtraTokens) and not spec.causal:
        return LearnedGlobalTokens(spec.pattern.global_tokens, spec.width)
    return NoGlobalTokens()


def _shift_slice(wanted: slice | None, length: int, offset: int) -> slice:
    """Shift a slice of ``length`` tokens by ``offset``; None selects all tokens."""
    start, stop, step = (wanted or slice(None)).indices(length)
    return slice(offset + start, offset + stop, step)


class EncoderDecoder(nn.Module):
    """Encoder-decoder transformer: the decoder attends to the encoder's output.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.

    Args:
        encoder: spec of the encoder, usually with ``causal=False``.
        decoder: spec of the decoder, with ``cross_attention=True``.

    Raises:
        ValueError: if the widths differ, or the decoder has no cross-attention.
    """

    def __init__(self, encoder: "TransformerSpec", decoder: "TransformerSpec"):
        super().__init__()
        if encoder.width != decoder.width:
            raise ValueError(
                f"encoder and decoder must have the same width, got {encoder.width} and {decoder.width}"
            )
        if not decoder.cross_attention:
            raise ValueError("the decoder requires cross_attention=True")
        self.encoder = encoder.build()
        self.decoder = decoder.build()

    def forward(
        self, source: Tensor, source_index: TokenIndex, target: Tensor, target_index: TokenIndex
    ) -> Tensor:
        """Encode source (B, N, C) and decode target (B, T, C), each with its index -> (B, T, C)."""
        encoded = self.encoder.outputs(source, source_index)
        return self.decoder.outputs(target, target_index, context=Context(encoded, source_index))
