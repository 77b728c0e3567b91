"""Modules of a transformer, and what every pass through them needs: masks, auxiliary losses, updates."""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.cache import Context, ProjectedContext
from rlxf.attention.depth.base import DepthController
from rlxf.attention.kernels.base import AttentionKernel, Kernel
from rlxf.attention.layer_stack import LayerStack, SegmentStack
from rlxf.attention.layers import Block, Layer, RecurrentBlock
from rlxf.attention.memory.base import MemoryView, NoMemory, State
from rlxf.attention.norm import NORM_TYPES
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.patterns.window import limit_distance
from rlxf.attention.positions.base import PositionEmbedding
from rlxf.attention.recurrent.base import RecurrentMixer, RecurrentState
from rlxf.attention.relative import DistanceTables
from rlxf.attention.technique import PendingTerms, SpecView
from rlxf.attention.token_index import EMPTY, TokenIndex


class TransformerLayers(nn.Module):
    """Modules that a `TransformerSpec` describes, without the passes of `Transformer`.

    Attributes:
        pass_patterns: pattern of each pass.
    """

    def __init__(self, spec: SpecView):
        super().__init__()
        self.spec: Any = spec  # a TransformerSpec
        self.memory = spec.memory or NoMemory()
        self.embedding = spec.position.build_shared(spec) if spec.position else PositionEmbedding()
        self.global_token_embedding = spec.pattern.build_global_tokens(spec.width, spec.causal)
        self.order = [spec.depth.layer_of_pass(number) for number in range(spec.layers)]
        self.pass_patterns: list[Pattern] = [spec.pattern.for_layer(number) for number in range(spec.layers)]
        layers = (_of_layer(spec, *each) for each in enumerate(spec.kernel.for_layers(spec.distinct_layers)))
        kinds = (RecurrentBlock if spec.is_recurrent(n) else Block for n in range(spec.distinct_layers))
        blocks = (kind(layer) for kind, layer in zip(kinds, layers, strict=True))
        self.blocks: Sequence[Layer] = nn.ModuleList(blocks)  # type: ignore
        self.depth = spec.depth.build(spec.width, spec.layers)
        first: dict[Hashable, AttentionKernel] = {}
        for kernel in self._find_kernels():
            if kernel.weight_group is not None:
                kernel.tie_weights(first.setdefault(kernel.weight_group, kernel))
        if self.order.count(self.order[-1]) == 1:
            self.global_token_embedding.trim_last_layer(self.blocks[-1])
        self._kernels = tuple(self._find_kernels())
        self.norm = NORM_TYPES[spec.norm_type](spec.width) if spec.final_norm else nn.Identity()
        self._penalty_inputs: list[tuple[MemoryView, Sequence[Tensor]]] = PendingTerms()

    def _output(self, stream: Tensor) -> Tensor:
        """Compute the output (..., C) from the residual stream."""
        return self.norm(self.spec.residual.output(stream))

    @property
    def _like(self) -> Tensor:
        """Parameter with the dtype and on the device of the core; in a replica, see `_replica_tensors`."""
        return next(chain(self.parameters(), _replica_tensors(self)))

    @property
    def pass_layers(self) -> list[Layer]:
        """Layer of each pass; modules of `blocks` may be replaced."""
        return [self.blocks[layer] for layer in self.order]

    @property
    def attention_passes(self) -> list[int]:
        """Numbers of the passes with attention, from 0."""
        return self.spec.attention_passes

    @property
    def recurrent_kernel_passes(self) -> list[int]:
        """Numbers of the passes with attention whose kernel acts from a recurrent state, from 0."""
        kernels = self.spec.kernel.for_layers(self.spec.distinct_layers)
        patterns = self.pass_patterns
        return [n for n in self.attention_passes if kernels[self.order[n]].is_recurrent(patterns[n])]

    def penalty(self) -> Tensor | None:
        """Return the auxiliary loss of depth, kernels and memory for the last forward; None for none.

        A part that depends on tokens is returned once, and only if that forward had gradient.
        """
        parts: list[DepthController | AttentionKernel] = [self.depth, *self._kernels]
        terms = [*(part.penalty() for part in parts), self._memory_penalty()]
        present = [term for term in terms if term is not None]
        return torch.stack(present).sum() if present else None

    def _prepare_penalty(self, view: MemoryView, passes: SegmentStack) -> None:
        """Make `penalty` refer to the given passes instead of earlier ones, whose tensors it releases."""
        inputs = [(view, passes.hidden)] if view.has_penalty and torch.is_grad_enabled() else []
        self._penalty_inputs = PendingTerms(inputs)
        for kernel in self._kernels if self.spec.kernel.token_loss_option else ():
            kernel.reset_penalty()

    def _memory_penalty(self) -> Tensor | None:
        """Return the auxiliary loss of memory once per forward; None afterwards."""
        inputs, self._penalty_inputs = self._penalty_inputs, PendingTerms()
        return inputs[0][0].penalty(inputs[0][1]) if inputs else None

    def mean_depth(self) -> Tensor | None:
        """Return the mean number of passes per token in the last call; None if the depth is fixed.

        Any call that runs the layers counts, such as `next_state` or `step`; those with early exits do not.
        """
        return self.depth.mean_depth()

    def pop_mean_acting_depth(self) -> Tensor | None:
        """Return the mean number of passes per token with early exits since the last call, and reset it.

        None if there was no such call, or if the depth is fixed.
        """
        return self.depth.pop_mean_acting_depth()

    def after_update(self) -> None:
        """Notify the kernels that the weights have changed. Call it before the next forward or cache."""
        for kernel in self._kernels:
            kernel.after_update()

    def skip_update(self) -> None:
        """Notify the kernels that no update follows the last forward. Call it instead of `after_update`."""
        for kernel in self._kernels:
            kernel.skip_update()

    def _find_kernels(self) -> list[AttentionKernel]:
        """Return the kernels of attention layers; a recurrent mixer may own another one."""
        mixers = [module for module in self.modules() if isinstance(module, RecurrentMixer)]
        owned = {part for mixer in mixers for part in mixer.modules()}
        return [each for each in self.modules() if isinstance(each, AttentionKernel) and each not in owned]

    def embed(
        self, x: Tensor, index: TokenIndex, output_slice: slice | None = None
    ) -> tuple[Tensor, TokenIndex, slice | None]:
        """Embed tokens (B, T, C) and prepend the global tokens of the pattern, if it has any.

        Returns:
            The input of the first layer, the index of all tokens, and ``output_slice`` among all tokens.
        """
        x = self.embedding(x, index.filled_position)
        full_index = self.global_token_embedding.index(index)
        count = full_index.shape[1] - index.shape[1]
        output_slice = _shift_slice(output_slice, index.shape[1], count) if count else output_slice
        return self.global_token_embedding(x, full_index), full_index, output_slice

    def initial_recurrent_state(self, batch: int) -> RecurrentState | None:
        """Return the states of recurrent layers and memory before the first token; None without either."""
        like = self._like
        carry = self.memory.initial_carry(self.spec.layers, batch, like, self.spec.width)
        if self.spec.recurrence is None and not carry:
            return None
        passes = tuple(layer.initial_state(batch) for layer in self.pass_layers)
        owners = (self.spec.recurrence, self.spec.memory if carry else None)
        techniques = tuple(type(owner).__name__ for owner in owners if owner is not None)
        return RecurrentState(passes, torch.full((batch,), EMPTY, device=like.device), carry, techniques)

    def recurrent_fault(self, state: RecurrentState | None, most: float = math.inf) -> str | None:
        """Describe the first value of states that is not finite or above ``most``, if there is any."""
        fault = None if state is None else state.first_fault(most)
        if fault is None:
            return None
        number, name, value, row = fault
        owner = f"the memory {self.spec.memory}"
        if number is not None:
            owner = f"layer {self.order[number] + 1}, {self.spec.recurrence}"
        return f"the recurrent state {name!r} of {owner}, contains {value} in row {row} of the batch"

    def memory_view(self, state: State | None, index: TokenIndex) -> MemoryView:
        """Create the view of the memory for a segment with the given index (B, T)."""
        return self.memory.view(state, index, self.pass_layers)

    def carry(self, passes: LayerStack) -> RecurrentState | None:
        """Return the states of recurrent layers and memory after the passes of T tokens; None without."""
        if passes.recurrent is None:
            return None
        state = passes.recurrent.state
        if not state.memory:
            return state
        memory = self.memory.carry(state.memory, torch.stack(list(passes.hidden)), passes.recurrent.runs)
        return replace(state, memory=memory)

    def attention_mask(self, query: TokenIndex, key: TokenIndex) -> AttentionMask:
        """Return the attention mask of the first layer; tokens that memory compresses count as visible."""
        pattern = self.memory.visible_pattern(self.spec.pattern.for_layer(0))
        return self._mask(query, key, pattern, None)

    def attention_masks(
        self, query: TokenIndex, key: TokenIndex, tables: DistanceTables | None = None
    ) -> list[AttentionMask]:
        """Return the attention mask of each pass; passes with the same pattern share one object."""
        patterns = self.pass_patterns
        if tables is None:  # skip distances at which the kernel of a layer gives no weight
            limits = [block.max_distance for block in self.pass_layers]
            patterns = [limit_distance(one, most) for one, most in zip(patterns, limits, strict=True)]
        masks = {pattern: self._mask(query, key, pattern, tables) for pattern in set(patterns)}
        return [masks[pattern] for pattern in patterns]

    def _mask(
        self, query: TokenIndex, key: TokenIndex, pattern: Pattern, tables: DistanceTables | None
    ) -> AttentionMask:
        spec = self.spec
        position = None if spec.position is None else spec.position.distance_module(self.embedding)
        heads = {"heads": spec.score_heads, "maps": spec.score_heads // spec.heads}
        return AttentionMask(query, key, pattern, spec.causal, self._like.dtype, position, tables, **heads)

    def _step_tables(self, max_distance: int) -> DistanceTables:
        """Compute the distance tables for steps, from ``max_distance`` down to 0."""
        distances = torch.arange(max_distance, -1, -1, device=self._like.device)
        return DistanceTables(distances, self.embedding.table(distances, self.spec.causal), max_distance)

    def _project(self, context: Context | None) -> ProjectedContext | None:
        if (context is not None) != self.spec.cross_attention:
            article = "a" if context is not None else "no"
            raise ValueError(
                f"cross_attention is {self.spec.cross_attention}, but {article} context was given"
            )
        if context is None:
            return None
        crosses = [block.cross for block in self.pass_layers if block.cross is not None]
        layers = [cross.attention.project(context.x) for cross in crosses]
        return ProjectedContext(layers, context.index)


def _replica_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that replace parameters in a replica of torch's data parallelism, as attributes."""
    values = (value for part in module.modules() for value in vars(part).values())
    return (x for x in values if isinstance(x, Tensor) and x.is_floating_point())


def _of_layer(spec: Any, layer: int, kernel: Kernel) -> SpecView:
    """Return the spec of one layer of a `Transformer`, with its own kernel, memory and recurrence."""
    memory = spec.memory and spec.memory.for_layer(layer, spec.layers)
    recurrence = spec.recurrence and spec.recurrence.for_layer(layer)
    return replace(spec, kernel=kernel, memory=memory, recurrence=recurrence)


def _shift_slice(output_slice: slice | None, length: int, offset: int) -> slice:
    """Shift a slice of ``length`` tokens by ``offset``; None selects all tokens."""
    start, stop, step = (output_slice or slice(None)).indices(length)
    return slice(offset + start, offset + stop, step)
