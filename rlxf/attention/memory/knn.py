"""kNN memory: one layer also retrieves, from many older tokens, those whose keys are nearest to its query."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from rlxf.attention.checks import check_whole, check_word
from rlxf.attention.index import Index
from rlxf.attention.kernels.softmax import Softmax
from rlxf.attention.memory.base import Memory
from rlxf.attention.memory.knn_recall import KNNRecall
from rlxf.attention.memory.nearest import NEAREST, Finder
from rlxf.attention.memory.state import State, joined
from rlxf.attention.memory.xl import XL
from rlxf.attention.patterns.base import GlobalTokens
from rlxf.attention.technique import Choices


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
        layer: number of the kNN layer, from 1; None for three quarters of the depth, as in the paper.
        index: search backend: "torch", or "faiss" on CPU, which needs the extra ``knn``. Results are equal.

    Raises:
        TypeError: if a number is not an int.
        ValueError: if a number is less than 1, top exceeds far, or the index is unknown.
    """

    paper: ClassVar[str] = "Wu et al. 2022, arXiv:2203.08913"
    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "length pairs a token, in one layer length + far"
    length: int = 128
    far: int = 8192
    top: int = 32
    layer: int | None = None
    index: Finder = "torch"

    def __post_init__(self) -> None:
        for name in ("length", "far", "top"):
            check_whole(f"KNN memory {name}", getattr(self, name))
        if self.layer is not None:
            check_whole("KNN layer", self.layer)
        check_word("KNN index", self.index, tuple(NEAREST))
        if self.top > self.far:
            raise ValueError(f"KNN top must be at most far={self.far}, got {self.top}")

    def check(self, choices: Choices) -> None:
        """Raise ValueError unless kernel, pattern and depth are compatible.

        The kNN layer needs a softmax kernel, one projection for all tokens, and weights of its own.
        """
        super().check(choices)
        if type(choices.kernel) is not Softmax:
            raise ValueError(
                f"{self} retrieves keys by softmax scores, which {choices.kernel} does not use; "
                f"use kernel=Softmax()"
            )
        if isinstance(choices.pattern, GlobalTokens):
            raise ValueError(
                f"{self} uses one projection for all tokens of a layer, but {choices.pattern} has separate "
                f"projections for global tokens; use another pattern"
            )
        if self.layer is not None and self.layer > choices.layers:
            raise ValueError(f"layer of {self} must be at most the number of layers, {choices.layers}")
        depth: Any = choices.depth
        if depth.layer_of(choices.layers - 1) != choices.layers - 1:
            raise ValueError(
                f"{self} requires a layer that is used by one pass only, but {choices.depth} reuses layers; "
                f"use depth=Fixed()"
            )

    def number(self, layers: int) -> int:
        """Return the number of the kNN layer, from 0, given the number of layers."""
        return (-(-3 * layers // 4) if self.layer is None else self.layer) - 1

    def for_layer(self, number: int, layers: int) -> Memory:
        """Return this memory for the kNN layer, else an `XL` memory."""
        return self if number == self.number(layers) else XL(self.length)

    @property
    def holds(self) -> int:
        """Maximum distance, in tokens, in the kNN layer: M + N."""
        return self.length + self.far

    def shows_far(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether the token at position j is a far token for position i: distance M + 1 to M + N."""
        return (i - j > self.length) & (i - j <= self.holds)

    def empty(self, layers: int, batch: int, like: Tensor, width: int) -> State:
        """See `Memory`."""
        older = State.empty(1, batch, self.far, like, width)
        return replace(super().empty(layers, batch, like, width), older=older)

    def recall(self, state: State | None, index: Index, layers: Sequence[Any]) -> KNNRecall:
        """Create the view of a state for a segment.

        Far slots before all episodes of the segment are dropped, because there may be thousands of them.
        """
        if state is not None and state.older is not None:
            state = replace(state, older=state.older.met_by(index))
        return KNNRecall(state, index, self, self.number(len(layers)))

    def __call__(self, state: State, hidden: Tensor, index: Index) -> State:
        """Return the state after a segment; the kNN layer also keeps the N tokens before the last M."""
        after = super().__call__(state, hidden, index)
        layer = [self.number(len(hidden))]
        older = [] if state.older is None else [state.older]
        parts = [*older, State(state.hidden[layer], state.index), State(hidden[layer].detach(), index)]
        tokens = joined(parts)
        count = tokens.index.shape[1] - after.index.shape[1]
        return replace(after, older=tokens.at(slice(0, count)).last(self.far))
