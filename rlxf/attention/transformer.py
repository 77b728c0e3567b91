"""Transformer module, which processes segments and single tokens."""

from collections.abc import MutableSequence, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from rlxf.attention.cache import Context, KVCache
from rlxf.attention.depth.base import ConfidenceFn, ExitOutputs
from rlxf.attention.fused_step import FusedStep, NoFusedStep, build_fused_step
from rlxf.attention.input_checks import StateLayout, check_finite, check_step
from rlxf.attention.layer_stack import LayerStack, SegmentStack, StepStack, discarded_inputs
from rlxf.attention.layers import RecurrentKernelLayer, recurrent_cache
from rlxf.attention.memory.base import State
from rlxf.attention.recurrent.base import RecurrentPasses, RecurrentState
from rlxf.attention.token_index import TokenIndex, check_tokens
from rlxf.attention.transformer_layers import TransformerLayers


class Transformer(TransformerLayers):
    """Transformer that a `TransformerSpec` describes; created by `TransformerSpec.build`.

    `forward` maps a segment of T tokens and a memory state to outputs and the next state. `step` maps
    one token and a `KVCache` to an output. Both compute the same outputs, so acting matches training.
    """

    _fused_step: FusedStep | NoFusedStep | None = None

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
            The outputs (B, T, C), and the state after the segment: None without memory and without recurrent
            layers. Outputs at empty slots are undefined.

        Raises:
            ValueError: if a context is given without cross-attention, or missing with it; if the state is not
                finite, or of another core, batch or device.
        """
        if state is not None:
            self._check_finite_state(state, len(x))
        stream, passes = self._begin(x, index, state, context, None, self._memory_inputs)
        y = self._output(self.depth(stream, passes))
        return y, self._next_state(state, passes, index)

    @torch.no_grad()
    def next_state(
        self, x: Tensor, index: TokenIndex, state: State | None = None, context: Context | None = None
    ) -> State:
        """Return only the next state of `forward`, for a transformer with memory or recurrent layers.

        The last layer computes a single token, which saves time. Arguments are those of `forward`.
        """
        stream, passes = self._begin(x, index, state, context, slice(-1, None), self._memory_inputs)
        self.depth(stream, passes)
        next_state = self._next_state(state, passes, index)
        assert next_state is not None
        return next_state

    @property
    def _memory_inputs(self) -> list[Tensor] | None:
        """New list of the inputs of the passes, from which the memory is computed; None without memory."""
        return None if self.spec.memory is None else []

    def _next_state(self, state: State | None, passes: SegmentStack, index: TokenIndex) -> State | None:
        """Compute the state after the passes of a segment, without gradient."""
        if self.spec.memory is None and passes.recurrent is None:
            return None
        state = state or self.initial_state(len(index.episode))
        if self.spec.memory is not None:
            state = self.memory(state, torch.stack(list(passes.hidden)), index)
        recurrent = self.carry(passes)
        return replace(state, recurrent=recurrent and recurrent.map(Tensor.detach))

    def encode(
        self,
        x: Tensor,
        index: TokenIndex,
        state: State | None = None,
        context: Context | None = None,
        output_slice: slice | None = None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the outputs and the inputs of each layer, (B, T, C) each.

        Args:
            x, index, state, context: see `forward`.
            output_slice: tokens whose outputs are computed by the last layer and returned; None for all.
        """
        stream, passes = self._begin(x, index, state, context, output_slice, hidden=[])
        return self._output(self.depth(stream, passes)), passes.hidden

    def outputs(
        self,
        x: Tensor,
        index: TokenIndex,
        state: State | None = None,
        context: Context | None = None,
        output_slice: slice | None = None,
    ) -> Tensor:
        """Return only the outputs of `encode`. The inputs of layers are not stored."""
        return self._output(self.depth(*self._begin(x, index, state, context, output_slice)))

    def exits(
        self,
        x: Tensor,
        index: TokenIndex,
        state: State | None = None,
        context: Context | None = None,
        output_slice: slice | None = None,
    ) -> ExitOutputs:
        """Return the outputs after each pass, for training early exits. Arguments are those of `encode`.

        Only the last output is returned unless the depth technique supports early exits.
        """
        stream, passes = self._begin(x, index, state, context, output_slice)
        return self.depth.exits(stream, passes, self._output)

    @torch.no_grad()
    def early_outputs(
        self,
        x: Tensor,
        index: TokenIndex,
        state: State | None = None,
        output_slice: slice | None = None,
        confidence_fn: ConfidenceFn | None = None,
    ) -> Tensor:
        """Return outputs of a segment with early exits, (B, Tq, C), for acting.

        The final stream of a token that exits is copied to later passes, where other tokens attend to it.

        Args:
            x, index, state: see `encode`.
            output_slice: tokens that may exit early, and whose outputs are returned; None for all. The others
                take all passes, as in `exits`, so outputs differ from those of `early_step`, in which earlier
                tokens have exited.
            confidence_fn: confidence of the outputs, for a depth technique that uses one.
        """
        stream, passes = self._begin(x, index, state, None, output_slice)
        return self._output(self._run_early(stream, passes, confidence_fn))

    def _begin(
        self,
        x: Tensor,
        index: TokenIndex,
        state: State | None,
        context: Context | None,
        output_slice: slice | None,
        hidden: MutableSequence[Tensor] | None = None,
    ) -> tuple[Tensor, SegmentStack]:
        """Return the residual stream of a segment and its passes.

        ``hidden`` receives the inputs of the passes; None to discard them.
        """
        check_tokens(x, index, self.spec.width)
        if state is not None:
            self._check_state(state, len(index.episode))
        inputs = discarded_inputs() if hidden is None else hidden
        return self._begin_checked(x, index, state, context, output_slice, inputs)

    def _begin_checked(
        self,
        x: Tensor,
        index: TokenIndex,
        state: State | None,
        context: Context | None,
        output_slice: slice | None,
        hidden: MutableSequence[Tensor],
    ) -> tuple[Tensor, SegmentStack]:
        """Return the result of `_begin` for tokens and a state that are known to fit."""
        projected = self._project(context)
        x, index, output_slice = self.embed(x, index, output_slice)
        view = self.memory_view(state, index)
        passes = SegmentStack(
            embedding=self.embedding,
            residual=self.spec.residual,
            blocks=self.pass_layers,
            index=index,
            masks=view.adapt_masks(self.attention_masks(index, view.key)),
            context=projected,
            recurrent=self._recurrent_passes(None if state is None else state.recurrent, index),
            view=view,
            output_slice=output_slice,
            hidden=[] if view.has_penalty else hidden,
        )
        self._prepare_penalty(view, passes)
        return self.spec.residual.init_stream(x), passes

    def _check_state(self, state: State, batch: int) -> None:
        """Raise ValueError unless a state is one of this core, on its device, for ``batch`` rows."""
        like = self._like
        if like.dtype not in self._state_layouts:
            self._state_layouts[like.dtype] = StateLayout.of(self.initial_state(1))
        self._state_layouts[like.dtype].check(state, batch, like.device)

    def _check_finite_state(self, state: State, batch: int) -> None:
        """Raise ValueError like `_check_state`, and for a state that is not finite."""
        self._check_state(state, batch)
        check_finite(state, self.recurrent_fault)

    @cached_property
    def _state_layouts(self) -> dict[torch.dtype, StateLayout]:
        """Layouts of the states of this core, by the dtype of the core, which may change."""
        return {}

    def _check_cache(self, state: State, capacity: int) -> None:
        """Raise ValueError unless a cache with this capacity can be created from a state."""
        length = state.index.shape[1]
        self._check_finite_state(state, len(state.index.episode))
        if not self.spec.causal:
            raise ValueError("only a causal transformer can act token by token; set causal=True")
        if capacity < max(1, length):
            raise ValueError(f"capacity must be at least the state's length {length}, got {capacity}")

    def _recurrent_passes(self, state: RecurrentState | None, index: TokenIndex) -> RecurrentPasses | None:
        """Return the recurrent layers of a call, from a state or from the beginning; None without them."""
        state = state or self.initial_recurrent_state(len(index.episode))
        return None if state is None else RecurrentPasses(state, index)

    @torch.no_grad()
    def step(self, x: Tensor, index: TokenIndex, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Compute the output of one token per row and update the cache, without gradient.

        Args:
            x: tokens, (B, C).
            index: (B, 1), their positions and episodes. Positions of an episode must be consecutive.
            cache: KV cache, updated in place.

        Returns:
            The outputs (B, C), and the inputs of each layer (L, B, C), from which a state can be built.

        Raises:
            ValueError: if the shapes do not fit the transformer and the cache.
        """
        check_step(x, index, cache, self.spec.width)
        if (fused := self._fused_step_for(cache)) is not None:
            return fused(x, index, cache)
        stream, passes = self._begin_step(x, index, cache)
        y = self._output(self.depth(stream, passes))
        cache.recurrent = self.carry(passes)
        return y[:, 0], torch.cat(list(passes.hidden), dim=1).transpose(0, 1)

    @torch.no_grad()
    def early_step(
        self, x: Tensor, index: TokenIndex, cache: KVCache, confidence_fn: ConfidenceFn | None = None
    ) -> Tensor:
        """Run `step` with early exits and return only the outputs (B, C).

        Args:
            x, index, cache: see `step`.
            confidence_fn: see `early_outputs`.

        Raises:
            ValueError: if the shapes do not fit, or the depth technique decides about exits by whole
                sequences.
        """
        check_step(x, index, cache, self.spec.width)
        if not self.spec.depth.exits_token_by_token:
            raise ValueError(
                f"{self.spec.depth} decides about exits by the mean of a sequence and cannot run single "
                f"steps; use `early_outputs` on segments"
            )
        if (fused := self._fused_step_for(cache)) is not None:
            return fused(x, index, cache)[0]
        stream, passes = self._begin_step(x, index, cache)
        y = self._output(self._run_early(stream, passes, confidence_fn))[:, 0]
        cache.recurrent = self.carry(passes)
        return y

    def _fused_step_for(self, cache: KVCache) -> FusedStep | None:
        """Return the fused form of a step with this cache.

        It is None if there is no such form, if dropout is active, or while TorchScript traces the step.
        """
        if torch.jit.is_tracing():
            return None
        if self._fused_step is None or not self._fused_step.is_current:
            self._fused_step = build_fused_step(self)
        if isinstance(self._fused_step, NoFusedStep) or (self.training and self.spec.dropout):
            return None
        return self._fused_step if self._fused_step.accepts(cache) else None

    def _replicate_for_data_parallel(self) -> Self:
        """Return a replica as torch makes it for data parallelism; it builds its own fused step."""
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica._fused_step = None
        return replica

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy; a copy builds its own fused step, which holds its own parameters."""
        return self.__dict__ | {"_fused_step": None}

    def _begin_step(self, x: Tensor, index: TokenIndex, cache: KVCache) -> tuple[Tensor, StepStack]:
        """Return the residual stream of one token per row, (B, 1, C), and its passes."""
        slot = cache.write(index)
        passes = StepStack(
            embedding=self.embedding,
            residual=self.spec.residual,
            blocks=self.pass_layers,
            index=index,
            masks=cache.adapt_masks(self.attention_masks(index, cache.index, cache.tables)),
            context=cache.context,
            recurrent=self._recurrent_passes(cache.recurrent, index),
            cache=cache,
            slot=slot,
        )
        return self.spec.residual.init_stream(self.embedding(x[:, None], index.filled_position)), passes

    def weights(
        self, x: Tensor, index: TokenIndex, state: State | None, context: Context | None
    ) -> list[Tensor]:
        """Compute `rlxf.attention.inspection.attention_weights`, with global tokens as the first queries."""
        _, hidden = self.encode(x, index, state, context)
        _, full_index, _ = self.embed(x, index)
        view = self.memory_view(state, full_index)
        masks = view.adapt_masks(self.attention_masks(full_index, view.key))
        layers: Any = self.pass_layers
        return [
            view.weights_by_token(n, layers[n].weights(hidden[n], view.tokens(n, hidden[n]), masks[n]))
            for n in self.attention_passes
        ]

    def by_token(self, values: Sequence[Tensor], index: TokenIndex, state: State | None) -> list[Tensor]:
        """Return values of a segment's tokens, (B, T, F), given those of all tokens of a call of `encode`.

        Args:
            values: values that a module of a layer computes in its calls, (B, S, F), in order.
            index, state: see `forward`.
        """
        return [x[:, -index.shape[1] :] for x in values]

    def initial_state(self, batch: int) -> State:
        """Return the state before the first token for ``batch`` rows; its length is 0 without memory."""
        state = self.memory.empty(self.spec.layers, batch, self._like, self.spec.width)
        return replace(state, recurrent=self.initial_recurrent_state(batch))

    @torch.no_grad()
    def cache(self, state: State, capacity: int, context: Context | None = None) -> KVCache:
        """Create a KV cache from a memory state with the current weights.

        A cache that is created within ``torch.inference_mode()`` can only be used within it, because steps
        update it in place.

        Args:
            state: memory state; `initial_state` at the start.
            capacity: number of tokens S in the cache, including the current one; at least the state's length.
                With ``Window(M + 1)`` and ``XL(M)``, M + 1 tokens suffice if no
                empty slot lies inside an episode: the window counts positions, the ring buffer counts slots.
                In a layer with the pattern `Full` and a `RecurrentKernel` the capacity has no effect: a step
                attends to its whole episode from the first token in the state, at constant cost.
                With `Compressive` memory the memory defines the visible tokens. Capacity beyond the state's
                length plus 1 makes room for empty slots inside an episode.
            context: encoder output for cross-attention; None without it.

        Raises:
            ValueError: if the state does not fit the capacity, is not finite, or is of another core or
                device; if the transformer is not causal.
        """
        self._check_cache(state, capacity)
        recurrent = self.recurrent_kernel_passes
        if recurrent and recurrent == self.attention_passes:
            cache = recurrent_cache(state, self.pass_layers)
        else:
            tables = self._step_tables(self.memory.step_distance(capacity, self.spec.pattern))
            layers = [
                RecurrentKernelLayer(x) if n in recurrent else x for n, x in enumerate(self.pass_layers)
            ]
            cache = self.memory.cache(state, capacity, layers, tables)
        cache.context, cache.recurrent = self._project(context), state.recurrent
        return cache

    def _run_early(self, x: Tensor, passes: LayerStack, confidence_fn: ConfidenceFn | None) -> Tensor:
        """Run the passes with early exits and return the stream of each token at its exit."""
        return self.depth.early_exit(
            x, passes, None if confidence_fn is None else lambda s: confidence_fn(self._output(s))
        )
