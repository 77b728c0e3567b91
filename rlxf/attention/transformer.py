"""The transformer: a segment at a time to learn, a token at a time to act."""

from collections.abc import MutableSequence, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlxf.attention.block import Block
from rlxf.attention.cache import Cache
from rlxf.attention.context import Context, ProjectedContext
from rlxf.attention.depth.base import Judge, Processor
from rlxf.attention.depth.exits import ExitDepth, Exiting, Exits
from rlxf.attention.extra_tokens import LearnedTokens, NoExtraTokens
from rlxf.attention.index import Index
from rlxf.attention.kernels.base import Kernel, LayerKernel, RecurrentKernel
from rlxf.attention.memory.compressive import Compressive
from rlxf.attention.memory.compressive_cache import CompressiveCache
from rlxf.attention.memory.knn import KNN
from rlxf.attention.memory.knn_cache import KNNCache
from rlxf.attention.memory.recall import Recall
from rlxf.attention.memory.state import State
from rlxf.attention.passes import LayerPasses, SegmentPasses, StepPasses, unasked
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.patterns.etc import ExtraTokens
from rlxf.attention.patterns.full import Full
from rlxf.attention.patterns.window import bounded
from rlxf.attention.positions.base import Embedding, PairwisePosition
from rlxf.attention.relation import Relation, Tables
from rlxf.attention.residuals.reversible import Reversible
from rlxf.attention.reversible_passes import ReversiblePasses

if TYPE_CHECKING:
    from rlxf.attention.spec import TransformerSpec


class Transformer(nn.Module):
    """The layers that a `TransformerSpec` describes; made by its ``build()``.

    `forward` reads a segment of T tokens after a state and gives the state after it. `step` reads
    one token and a `Cache`. Both give the same outputs: acting equals learning.
    """

    def __init__(self, spec: "TransformerSpec"):
        super().__init__()
        self.spec = spec
        self.embedding = (
            spec.position.build_embedding(spec.width, spec.heads) if spec.position else Embedding()
        )
        self.extra = _extra_tokens(spec)
        self.order = [spec.depth.layer_of(number) for number in range(spec.layers)]
        layers = (_of_layer(spec, *each) for each in enumerate(spec.kernel.for_layers(spec.kinds)))
        self.blocks: Sequence[Block] = nn.ModuleList(Block(layer) for layer in layers)  # type: ignore
        self.depth = spec.depth.build(spec.width, spec.layers)
        first, *others = self._kernels()
        for kernel in others:
            kernel.share(first)
        if isinstance(self.extra, LearnedTokens) and self.order.count(self.order[-1]) == 1:
            self.blocks[-1].forget_globals()
        self.norm = nn.LayerNorm(spec.width) if spec.final_norm else nn.Identity()
        self._read: tuple[Recall, Sequence[Tensor]] | None = None

    def forward(
        self, x: Tensor, index: Index, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        """Read a segment.

        Args:
            x: tokens, (B, T, C).
            index: where they stand, (B, T).
            state: what is remembered from before; None for nothing.
            context: what a decoder looks at beside its own tokens.

        Returns:
            The outputs (B, T, C), and the state after the segment: None without memory. Outputs
            at empty slots mean nothing.

        Raises:
            ValueError: if there is a context but no cross-attention, or the other way round.
        """
        if self.spec.memory is None:
            return self.outputs(x, index, state, context), None
        y, hidden = self.encode(x, index, state, context)
        return y, self._after(state, hidden, index)

    @torch.no_grad()
    def remember(
        self, x: Tensor, index: Index, state: State | None = None, context: Context | None = None
    ) -> State:
        """The state that `forward` gives, for a transformer with memory, without the outputs.

        So the last layer works for one token alone. Arguments as in `forward`.
        """
        _, hidden = self.encode(x, index, state, context, wanted=slice(-1, None))
        return self._after(state, hidden, index)

    def _after(self, state: State | None, hidden: Sequence[Tensor], index: Index) -> State:
        """The state after a segment, given the inputs of each layer (B, T, C)."""
        assert self.spec.memory is not None
        state = state or self.initial_state(len(index.episode))
        return self.spec.memory(state, torch.stack(list(hidden)), index)

    def encode(
        self,
        x: Tensor,
        index: Index,
        state: State | None = None,
        context: Context | None = None,
        wanted: slice | None = None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """`forward`, but with the inputs of each layer, (B, T, C), in place of the new state.

        ``wanted`` are the tokens whose outputs are given, None for all: the last layer works for those alone.
        """
        x, passes = self._begin(x, index, state, context, wanted, [])
        return self._output(self.depth(x, passes)), passes.hidden

    def outputs(
        self,
        x: Tensor,
        index: Index,
        state: State | None = None,
        context: Context | None = None,
        wanted: slice | None = None,
    ) -> Tensor:
        """The outputs of `encode` alone: the inputs of layers are not kept for it."""
        x, passes = self._begin(x, index, state, context, wanted, unasked())
        return self._output(self.depth(x, passes))

    def exits(
        self,
        x: Tensor,
        index: Index,
        state: State | None = None,
        context: Context | None = None,
        wanted: slice | None = None,
    ) -> Exits:
        """What may be read off a segment behind each pass, to learn from; arguments as in `encode`.

        That is one output, the last, unless the depth lets tokens leave early.
        """
        x, passes = self._begin(x, index, state, context, wanted, unasked())
        if not isinstance(self.depth, Exiting):
            stream = self.depth(x, passes)
            y = self._output(stream)[None]
            return Exits(y, y.new_ones(1), passes.read(stream)[None])
        assert isinstance(self.spec.depth, ExitDepth)
        opening, streams = self.depth.opening(x, passes), self.depth.all_outputs(x, passes)
        outputs = torch.stack([self._output(stream) for stream in streams])
        states = torch.stack([passes.read(stream) for stream in streams])
        shares = self.spec.depth.shares(len(streams)).to(outputs)
        return Exits(outputs, shares, states, partial(self.depth.lesson, opening, states))

    @torch.no_grad()
    def early(
        self,
        x: Tensor,
        index: Index,
        state: State | None = None,
        wanted: slice | None = None,
        judge: Judge | None = None,
    ) -> Tensor:
        """Outputs of a segment to act by, (B, Tq, C), where each wanted token leaves as early as it may.

        Arguments as in `encode`, and what is read off outputs, for a depth that asks for a `Judge`. What has
        left is copied to later passes, where others see it.
        """
        x, passes = self._begin(x, index, state, None, wanted, unasked())
        return self._output(self._left(x, passes, judge))

    def _begin(
        self,
        x: Tensor,
        index: Index,
        state: State | None,
        context: Context | None,
        wanted: slice | None,
        hidden: MutableSequence[Tensor],
    ) -> tuple[Tensor, SegmentPasses]:
        """The stream of a segment, and the passes before it; ``hidden`` is for the inputs of each."""
        seen = self._project(context)
        x, index, wanted = self.enter(x, index, wanted)
        recall = self.recall(state, index)
        passes = self._passes(
            embedding=self.embedding,
            residual=self.spec.residual,
            blocks=self._layers,
            index=index,
            relations=recall.related(self.relations(index, recall.key)),
            seen=seen,
            across=self._across(index, seen),
            recall=recall,
            wanted=wanted,
            hidden=[] if recall.learns else hidden,
        )
        if torch.is_grad_enabled():
            self._note(recall if recall.learns else None, passes)
        return self.spec.residual.opened(x), passes

    @torch.no_grad()
    def step(self, x: Tensor, index: Index, cache: Cache) -> tuple[Tensor, Tensor]:
        """Read one token a row, write it into the cache, and act. Without gradient.

        Args:
            x: (B, C), the tokens.
            index: (B, 1), where they stand. Positions of an episode must follow one another.
            cache: changed in place.

        Returns:
            The outputs (B, C), and the inputs of each layer (L, B, C): what a state is made of.
        """
        stream, passes = self._begin_step(x, index, cache)
        y = self._output(self.depth(stream, passes))
        return y[:, 0], torch.cat(list(passes.hidden), dim=1).transpose(0, 1)

    @torch.no_grad()
    def early_step(self, x: Tensor, index: Index, cache: Cache, judge: Judge | None = None) -> Tensor:
        """`step` of tokens that leave as early as they may: outputs (B, C) alone; ``judge`` as in `early`.

        Raises:
            ValueError: if the depth decides by whole sequences.
        """
        depth = self.spec.depth
        if isinstance(depth, ExitDepth) and not depth.by_step:
            raise ValueError(f"{depth} decides by the mean of a sequence, and here is a step; read segments")
        stream, passes = self._begin_step(x, index, cache)
        return self._output(self._left(stream, passes, judge))[:, 0]

    def _begin_step(self, x: Tensor, index: Index, cache: Cache) -> tuple[Tensor, StepPasses]:
        """The stream of one token a row, (B, 1, C), and the passes before it."""
        slot = cache.write(index)
        passes = StepPasses(
            embedding=self.embedding,
            residual=self.spec.residual,
            blocks=self._layers,
            index=index,
            relations=cache.related(self.relations(index, cache.index, cache.tables)),
            seen=cache.context,
            across=self._across(index, cache.context),
            cache=cache,
            slot=slot,
        )
        return self.spec.residual.opened(self.embedding(x[:, None], index.position)), passes

    def initial_state(self, batch: int) -> State:
        """A state that remembers nothing, for ``batch`` rows; of length 0 without memory."""
        sizes = batch, next(self.parameters()), self.spec.width
        if self.spec.memory is None:
            return State.empty(self.spec.layers, batch, 0, *sizes[1:])
        return self.spec.memory.empty(self.spec.layers, *sizes)

    @torch.no_grad()
    def cache(self, state: State, capacity: int, context: Context | None = None) -> Cache:
        """Project a state's keys and values, to act from it with the present weights.

        Args:
            state: what is remembered; `initial_state` to begin.
            capacity: tokens S that a step can see, itself included; at least the state's length.
                With ``Window(M + 1)`` and ``XL(M)``, M + 1 are all that count, as long as no
                empty slot stands inside an episode: the window counts positions, the ring slots.
                With the pattern `Full` and a `RecurrentKernel` nothing is left out: a step sees its
                episode from the first token in the state on, at the same cost for any capacity.
                With `Compressive` memory a step sees what that shows; more capacity than the state's
                length and one makes room for empty slots inside an episode.
            context: what a decoder looks at beside its own tokens.

        Raises:
            ValueError: if the state does not fit the capacity, or the transformer is not causal.
        """
        length = state.index.shape[1]
        if not self.spec.causal:
            raise ValueError("only a causal transformer can act token by token; set causal=True")
        if capacity < max(1, length):
            raise ValueError(f"capacity must be at least the state's length {length}, got {capacity}")
        if self._recurrent:
            return self._sums(state, context)
        if isinstance(self.spec.memory, Compressive):
            return self._compressive_cache(self.spec.memory, state, capacity, context)
        tables = self._acting_tables(min(capacity - 1, self.spec.pattern.reach))
        layers, batch = state.hidden.shape[:2]
        room = State.empty(layers, batch, capacity - length, state.hidden, self.spec.width)
        index = state.index.concatenate(room.index)
        hidden = torch.cat([state.hidden, room.hidden], dim=2)
        rings = [block.cache(h, index, tables) for block, h in zip(self._layers, hidden, strict=True)]
        near = Cache(rings, index, length % capacity, tables, self._project(context))
        if isinstance(self.spec.memory, KNN):
            number = self.spec.memory.number(layers)
            return KNNCache.begin(near, self._layers[number], self.spec.memory, state)
        return near

    def _compressive_cache(
        self, memory: Compressive, state: State, capacity: int, context: Context | None
    ) -> CompressiveCache:
        layers: Any = self._layers  # each of them compresses
        tables = self._acting_tables(memory.reach)
        return CompressiveCache.begin(memory, layers, state, capacity, tables, self._project(context))

    def _acting_tables(self, farthest: int) -> Tables:
        """Those of all distances at which a step may see a token."""
        distances = torch.arange(farthest, -1, -1, device=next(self.parameters()).device)
        return Tables(distances, self.embedding.table(distances, self.spec.causal))

    def _left(self, x: Tensor, passes: LayerPasses, judge: Judge | None) -> Tensor:
        """The stream where each token left."""
        return self.depth.early(x, passes, None if judge is None else lambda s: judge(self._output(s)))

    def _output(self, stream: Tensor) -> Tensor:
        """What is read off the stream, (..., C)."""
        y: Tensor = self.norm(self.spec.residual.closed(stream))
        return y

    def _passes(self, **given: Any) -> SegmentPasses:
        """Those of a segment; they can be taken back if there is a gradient to be found and layers can."""
        if isinstance(self.spec.residual, Reversible) and torch.is_grad_enabled():
            return ReversiblePasses(**given)
        return SegmentPasses(**given)

    @property
    def _layers(self) -> list[Block]:
        """The layer of each pass."""
        return [self.blocks[layer] for layer in self.order]

    @property
    def _recurrent(self) -> bool:
        """Whether no layer forgets before its episode ends, and the kernel needs no keys for that."""
        seen = {self.spec.pattern.for_layer(layer) for layer in range(self.spec.layers)}
        return seen == {Full()} and isinstance(self.spec.kernel, RecurrentKernel)

    def _sums(self, state: State, context: Context | None) -> Cache:
        """A cache that holds what the kernel remembers of a state, and a slot for the token that acts."""
        memories = [
            block.remember(h, state.index) for block, h in zip(self._layers, state.hidden, strict=True)
        ]
        index = Index.empty(state.index.shape[0], 1, state.hidden.device)
        tables = Tables(torch.zeros(1, dtype=torch.long, device=state.hidden.device), None)
        return Cache(memories, index, 0, tables, self._project(context))

    def penalty(self) -> Tensor | None:
        """What depth, kernels and memory add to the loss, a scalar; None for nothing. Of the last forward."""
        parts: list[Processor | LayerKernel] = [self.depth, *self._kernels()]
        terms = [*(part.penalty() for part in parts), self._penalty_of_memory()]
        found = [term for term in terms if term is not None]
        return torch.stack(found).sum() if found else None

    def _note(self, recall: Recall | None, passes: SegmentPasses) -> None:
        """What a penalty is asked for from now on."""
        self._read = None if recall is None else (recall, passes.hidden)
        for kernel in self._kernels() if self.spec.kernel.prices_tokens else ():
            kernel.begin_pass()

    def _penalty_of_memory(self) -> Tensor | None:
        """Asked again without a new pass, there is none."""
        read, self._read = self._read, None
        return None if read is None else read[0].penalty(read[1])

    def mean_depth(self) -> Tensor | None:
        """Passes that a token took on average in the last forward, a scalar; None if all take all."""
        return self.depth.mean_depth()

    def acting_depth(self) -> Tensor | None:
        """As `mean_depth`, over all `early` calls since last asked; None without one, or if all take all."""
        return self.depth.acting_depth()

    def after_update(self) -> None:
        """Tell the kernels that the weights have changed; before anything is cached or read anew."""
        for kernel in self._kernels():
            kernel.after_update()

    def skip_update(self) -> None:
        """Tell the kernels, in place of `after_update`, that the last pass is not learned from after all."""
        for kernel in self._kernels():
            kernel.skip_update()

    def _kernels(self) -> list[LayerKernel]:
        return [module for module in self.modules() if isinstance(module, LayerKernel)]

    def enter(
        self, x: Tensor, index: Index, wanted: slice | None = None
    ) -> tuple[Tensor, Index, slice | None]:
        """Tokens (B, T, C) as the first layer reads them, behind extra ones if the pattern has some.

        Also where they stand, and which of them are ``wanted``: as given, but no extra ones.
        """
        x, whole = self.embedding(x, index.position), self.extra.index(index)
        extra = whole.shape[1] - index.shape[1]
        return self.extra(x, whole), whole, _later(wanted, index.shape[1], extra) if extra else wanted

    def recall(self, state: State | None, index: Index) -> Recall:
        """What the tokens of a segment at an index (B, T) see of a state; None for nothing."""
        memory = self.spec.memory
        return Recall(state, index) if memory is None else memory.recall(state, index, self._layers)

    def relation(self, query: Index, key: Index) -> Relation:
        """Which tokens queries see in the first layer, in whatever form memory has them, and from how far."""
        pattern, memory = self.spec.pattern.for_layer(0), self.spec.memory
        return self._relation(query, key, pattern if memory is None else memory.shows(pattern), None)

    def relations(self, query: Index, key: Index, tables: Tables | None = None) -> list[Relation]:
        """What queries and keys are to one another in each pass; passes with the same pattern share it."""
        patterns = [self.spec.pattern.for_layer(layer) for layer in range(self.spec.layers)]
        if tables is None:
            patterns = [self._narrowed(*each) for each in zip(patterns, self._layers, strict=True)]
        made = {pattern: self._relation(query, key, pattern, tables) for pattern in set(patterns)}
        return [made[pattern] for pattern in patterns]

    @staticmethod
    def _narrowed(pattern: Pattern, block: Block) -> Pattern:
        """The pattern as far as the layer's kernel gives weight: no more pairs need be computed."""
        return bounded(pattern, block.attention.reach)

    def _relation(self, query: Index, key: Index, pattern: Pattern, tables: Tables | None) -> Relation:
        dtype, spec = next(self.parameters()).dtype, self.spec
        # Only positions that score pairs need to know the distances that there are.
        position = self.embedding if isinstance(spec.position, PairwisePosition) else None
        return Relation(query, key, pattern, spec.causal, dtype, position, tables, heads=spec.heads)

    def _across(self, query: Index, seen: ProjectedContext | None) -> Relation | None:
        dtype = next(self.parameters()).dtype
        return None if seen is None else Relation(query, seen.index, Full(), False, dtype)

    def _project(self, context: Context | None) -> ProjectedContext | None:
        if (context is not None) != self.spec.cross_attention:
            given = "a" if context is not None else "no"
            raise ValueError(f"cross_attention is {self.spec.cross_attention}, but {given} context was given")
        if context is None:
            return None
        layers = [block.cross.project(context.x) for block in self._layers if block.cross is not None]
        return ProjectedContext(layers, context.index)


def _of_layer(spec: "TransformerSpec", number: int, kernel: Kernel) -> "TransformerSpec":
    """The spec as one layer of a `Transformer` has it."""
    memory = spec.memory and spec.memory.for_layer(number, spec.layers)
    return replace(spec, kernel=kernel, memory=memory)


def _extra_tokens(spec: "TransformerSpec") -> NoExtraTokens:
    """Those of the pattern. What is causal has none: they would see nothing, or what is ahead."""
    if isinstance(spec.pattern, ExtraTokens) and not spec.causal:
        return LearnedTokens(spec.pattern.global_tokens, spec.width)
    return NoExtraTokens()


def _later(wanted: slice | None, length: int, by: int) -> slice:
    """The same of ``length`` tokens, behind ``by`` others; None for all."""
    start, stop, step = (wanted or slice(None)).indices(length)
    return slice(by + start, by + stop, step)


class EncoderDecoder(nn.Module):
    """An encoder, whose output is the context of a decoder.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.

    Args:
        encoder: its spec; as a rule ``causal=False``.
        decoder: its spec, with ``cross_attention=True``.

    Raises:
        ValueError: if the widths differ, or the decoder has no cross-attention.
    """

    def __init__(self, encoder: "TransformerSpec", decoder: "TransformerSpec"):
        super().__init__()
        if encoder.width != decoder.width:
            raise ValueError(f"encoder and decoder need one width, got {encoder.width} and {decoder.width}")
        if not decoder.cross_attention:
            raise ValueError("the decoder needs cross_attention=True")
        self.encoder = encoder.build()
        self.decoder = decoder.build()

    def forward(self, source: Tensor, source_index: Index, target: Tensor, target_index: Index) -> Tensor:
        """source (B, N, C) and target (B, T, C), each with its index -> (B, T, C)."""
        encoded = self.encoder.outputs(source, source_index)
        return self.decoder.outputs(target, target_index, context=Context(encoded, source_index))
