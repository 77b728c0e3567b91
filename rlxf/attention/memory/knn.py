"""Memory of distant tokens that each query reads through its nearest keys (Memorizing Transformers)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.attention import LayerCache
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.cache import KVCache
from rlxf.attention.memory.base import Memory, MemoryView, State, concatenate_states
from rlxf.attention.memory.knn_attention import (
    SEARCH_FUNCTIONS,
    FarLayerCache,
    KNNAttention,
    KNNMask,
    SearchBackend,
)
from rlxf.attention.memory.xl import XL
from rlxf.attention.relative import DistanceTables
from rlxf.attention.technique import AttentionFactory, SpecView
from rlxf.attention.token_index import TokenIndex
from rlxf.utils.checks import check_choice, check_int


@dataclass(frozen=True, eq=False)
class KNNView(MemoryView):
    """View of a kNN memory for a segment, with far tokens in pass ``knn_pass``.

    Args:
        memory: memory technique, which defines the far tokens.
        knn_pass: number of the pass with kNN attention, from 0.
    """

    memory: "KNN"
    knn_pass: int

    @cached_property
    def far(self) -> TokenIndex:
        """Index of the tokens at a distance of more than M slots from the segment's last token, (B, F)."""
        older = None if self.state is None else self.state.older
        tokens = self.key if older is None else older.index.concatenate(self.key)
        return tokens.at(slice(0, max(0, tokens.shape[1] - self.memory.length - 1)))

    def adapt_masks(self, masks: Sequence[AttentionMask]) -> Sequence[AttentionMask]:
        return KNNMask.extend(masks, self.knn_pass, self.memory.is_far, self.far)

    def tokens(self, pass_index: int, x: Tensor) -> Tensor | None:
        """Return the memory tokens of a pass; in the kNN layer far tokens come first, (B, F + M, C)."""
        near = super().tokens(pass_index, x)
        if pass_index != self.knn_pass:
            return near
        memory = [] if near is None else [near]
        older = [] if self.state is None or self.state.older is None else [self.state.older.hidden[0]]
        tokens = torch.cat([*older, *memory, x.detach()], dim=1)
        return torch.cat([tokens[:, : self.far.shape[1]], *memory], dim=1)

    def weights_by_token(self, pass_index: int, weights: Tensor) -> Tensor:
        """Convert weights over keys to weights over tokens of state and segment.

        Weights of far tokens before the M tokens that all layers store are dropped.
        """
        if pass_index != self.knn_pass:
            return weights
        far, near = weights.split([self.far.shape[1], self.key.shape[1]], dim=-1)
        older = 0 if self.state is None or self.state.older is None else self.state.older.index.shape[1]
        retrieved = far[..., older:]
        return near + F.pad(retrieved, (0, near.shape[-1] - retrieved.shape[-1]))


@dataclass(frozen=True)
class KNN(Memory):
    r"""`XL` memory of M tokens, with kNN attention ``g o_far + (1 - g) o_near`` in one layer.

    This is the Memorizing Transformer. In the kNN layer queries and keys have length 1 and scores are
    ``exp(s) q . k``, with s learned per head. o_near is the usual attention. o_far attends to k tokens of
    the episode: those with the largest scores at distances from M + 1 to M + N. Its softmax covers
    only these k tokens and uses no position encoding. The gate ``g = sigmoid(w)`` is learned per
    head; for a query without far tokens the output is o_near.

    Far tokens are defined by positions, so acting step by step equals learning in segments of any length.
    Retrieved keys and values have no gradient, even those from the same segment. A state
    stores the inputs of the kNN layer for N tokens; they are projected with the current weights.

    The search is exact over all N tokens: ``torch.topk``, or with index="faiss" a flat faiss
    index per row and head. The memory changes with each step and its visible part differs between
    queries, so an index cannot be reused, and "torch" is faster.

    Source: Wu et al. 2022, arXiv:2203.08913, section 3.

    Args:
        length: memory length M of each layer, in tokens, at least 1; use the pattern ``Window(M + 1)``.
        far: number of far tokens N in the memory of the kNN layer.
        top: number of far tokens k that a query attends to.
        layer: number of the kNN layer, from 1; None for three quarters of the depth, as in the paper. In a
            transformer with a recurrence, this layer must be one of ``attention_layers`` (counted from 0).
        index: search backend: "torch", or "faiss" on CPU, which needs the extra ``knn``. Results are equal.

    Raises:
        TypeError: if a number is not an int.
        ValueError: if a number is less than 1, top exceeds far, or the index is unknown.
    """

    paper: ClassVar[str] = "Wu et al. 2022, arXiv:2203.08913"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "length pairs per token; (length + far) pairs in one layer"
    length: int = 128
    far: int = 8192
    top: int = 32
    layer: int | None = None
    index: SearchBackend = "torch"

    def __post_init__(self) -> None:
        for name in ("length", "far", "top"):
            check_int(f"KNN memory {name}", getattr(self, name))
        if self.layer is not None:
            check_int("KNN layer", self.layer)
        check_choice("KNN index", self.index, tuple(SEARCH_FUNCTIONS))
        if self.top > self.far:
            raise ValueError(f"KNN top must be at most far={self.far}, got {self.top}")

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless kernel, pattern and depth are compatible.

        The kNN layer needs a softmax kernel, one projection for all tokens, and weights of its own.
        """
        super().check(choices)
        self._check_layer(choices)
        self.check_full_softmax(choices)
        if len(choices.pattern.query_rules) > 1:
            raise ValueError(
                f"{self} uses one projection for all tokens of a layer, but {choices.pattern} has separate "
                f"projections for global tokens; use another pattern"
            )
        if choices.qk_norm is not None:
            raise ValueError(
                f"{self} normalizes queries and keys to length 1 in its kNN layer, and qk_norm="
                f"{choices.qk_norm!r} would do it again; use qk_norm=None"
            )
        if choices.depth.layer_of_pass(choices.layers - 1) != choices.layers - 1:
            raise ValueError(
                f"{self} requires a layer that is used by one pass only, but {choices.depth} reuses layers; "
                f"use depth=Fixed()"
            )

    def _check_layer(self, choices: SpecView) -> None:
        """Raise ValueError unless the kNN layer exists and has attention."""
        number = self.older_layer(choices.layers)
        if number >= choices.layers:
            raise ValueError(
                f"layer of {self} must be at most the number of layers, {choices.layers}; use layer=None"
            )
        if choices.has_attention and choices.is_recurrent(number):
            raise ValueError(
                f"{self} retrieves tokens by attention in layer {number + 1}, which has the recurrence "
                f"{choices.recurrence}; use layer={choices.attention_layers[-1] + 1}, or list {number} in "
                f"attention_layers"
            )

    def attention_class(self, default: AttentionFactory) -> AttentionFactory:
        return partial(KNNAttention, top=self.top, index=self.index)

    def cache(self, state: State, capacity: int, layers: Sequence[Any], tables: DistanceTables) -> "KNNCache":
        near = super().cache(state, capacity, layers, tables)
        number = self.older_layer(len(layers))
        older = [] if state.older is None else [state.older]
        stored = concatenate_states([*older, State(state.hidden[number : number + 1], state.index)])
        slot = stored.index.shape[1]
        spare = max(1, capacity - state.index.shape[1])
        retrievable = max(slot, self.capacity) + spare - 1
        buffer = stored.padded(retrievable + 1 + retrievable // SPARE_DIVISOR)
        keys, values = layers[number].attention.far(layers[number].project(buffer.hidden[0]))
        caches: list[Any] = list(near.layers)
        ring = caches[number]
        far = LayerCache(keys, values, None)
        caches[number] = FarLayerCache(ring.keys, ring.values, ring.table, far)
        return KNNCache(
            layers=caches,
            index=near.index,
            slot=near.slot,
            tables=near.tables,
            memory=self,
            knn_pass=number,
            far=buffer.index,
            far_slot=slot,
            retrievable=retrievable,
            written=WriteCounter(slot),
        )

    def older_layer(self, layers: int) -> int:
        """Return the number of the kNN layer, from 0, given the number of layers."""
        return (-(-3 * layers // 4) if self.layer is None else self.layer) - 1

    def for_layer(self, layer: int, layers: int) -> Memory:
        """Return this memory for the kNN layer, else an `XL` memory."""
        return self if layer == self.older_layer(layers) else XL(self.length)

    @property
    def capacity(self) -> int:
        """Maximum distance, in tokens, in the kNN layer: M + N."""
        return self.length + self.far

    def check_traceable(self) -> None:
        """Raise ValueError: the buffer of far tokens is shared by caches and moves when it is full."""
        raise ValueError(f"the buffer of far tokens of {self} moves when it is full")

    def is_far(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether the token at position j is a far token for position i: distance M + 1 to M + N."""
        return (i - j > self.length) & (i - j <= self.capacity)

    def empty(self, layers: int, batch: int, like: Tensor, width: int) -> State:
        older = State.empty(1, batch, self.far, like, width)
        return replace(super().empty(layers, batch, like, width), older=older)

    def view(self, state: State | None, index: TokenIndex, layers: Sequence[Any]) -> KNNView:
        """Create the view of a state for a segment.

        Far slots before all episodes of the segment are dropped, because there may be thousands of them.
        """
        if state is not None and state.older is not None:
            state = replace(state, older=state.older.relevant_to(index))
        return KNNView(state, index, self, self.older_layer(len(layers)))

    def __call__(self, state: State, hidden: Tensor, index: TokenIndex) -> State:
        """Return the state after a segment; the kNN layer also keeps the N tokens before the last M."""
        after = super().__call__(state, hidden, index)
        number = self.older_layer(len(hidden))
        layer = slice(number, number + 1)
        older = [] if state.older is None else [state.older]
        parts = [*older, State(state.hidden[layer], state.index), State(hidden[layer].detach(), index)]
        tokens = concatenate_states(parts)
        count = tokens.index.shape[1] - after.index.shape[1]
        return replace(after, older=tokens.at(slice(0, count)).last(self.far))


SPARE_DIVISOR = 8
"""The far buffer has 1 / SPARE_DIVISOR more slots than retrievable tokens, so that it is rarely compacted."""


@dataclass(eq=False)
class WriteCounter:
    """Number of slots of a far buffer that have been written by the caches that share it."""

    slots: int


@dataclass(eq=False)
class KNNCache(KVCache):
    """`KVCache` with a far buffer in the kNN layer, for all tokens that are or become far.

    Copies share the far buffer of thousands of tokens, and each slot is written once (copy on write). A cache
    whose next slot was written by another copy, or whose buffer is full, moves the retrievable tokens to a
    new buffer.

    Args:
        memory: memory technique, which defines the far tokens.
        knn_pass: number of the pass with kNN attention, from 0.
        far: (B, F), index of the tokens in the buffer; empty for slots that other copies wrote.
        far_slot: slot of the next token in the buffer.
        retrievable: number of tokens before ``far_slot`` that can be retrieved.
        written: number of written slots, shared with the buffer.
    """

    memory: KNN
    knn_pass: int
    far: TokenIndex
    far_slot: int
    retrievable: int
    written: WriteCounter

    def write(self, index: TokenIndex) -> int:
        if self._must_move:
            self._move()
        slot = self.far_slot
        self.far.write(slice(None), slot, index)
        self.far_slot = self.written.slots = slot + 1
        return super().write(index)

    @property
    def _must_move(self) -> bool:
        """True if the next slot does not exist, was written by a copy, or cannot be modified in this mode."""
        if self.far_slot < self.written.slots or self.far_slot == self.far.shape[1]:
            return True
        layers: Sequence[Any] = self.layers
        keys: Tensor = layers[self.knn_pass].far.keys
        return keys.is_inference() and not torch.is_inference_mode_enabled()

    @torch.inference_mode(False)
    def _move(self) -> None:
        """Move the retrievable tokens to the start of a new buffer of the same size.

        Rollouts run in inference mode. Tensors created in that mode cannot be modified outside of it.
        """
        kept = slice(max(0, self.far_slot - self.retrievable), self.far_slot)
        self.far_slot -= kept.start
        batch, size = self.far.shape
        empty = TokenIndex.empty(batch, size - self.far_slot, self.far.position.device)
        self.far, self.written = self.far.at(kept).concatenate(empty), WriteCounter(self.far_slot)
        layers: list[Any] = list(self.layers)
        layers[self.knn_pass] = layers[self.knn_pass].compact(kept)
        self.layers = layers

    def adapt_masks(self, masks: Sequence[AttentionMask]) -> Sequence[AttentionMask]:
        return KNNMask.extend(masks, self.knn_pass, self.memory.is_far, self.far, self.far_slot - 1)

    def rows(self, rows: Tensor) -> "KNNCache":
        return replace(super().rows(rows), far=self.far.rows(rows), written=WriteCounter(self.far_slot))

    def copy(self) -> "KNNCache":
        """Return a copy of all rows that shares the far buffer."""
        layers: Sequence[Any] = self.layers
        index, far = (TokenIndex(x.position.clone(), x.episode.clone()) for x in (self.index, self.far))
        recurrent = self.recurrent and self.recurrent.map(Tensor.clone)
        copies = [layer.copy() for layer in layers]
        return replace(self, layers=copies, index=index, far=far, recurrent=recurrent)
