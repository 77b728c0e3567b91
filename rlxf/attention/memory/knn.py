"""kNN memory: one layer also finds, among many older tokens, those whose keys are nearest to its query."""

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
    r"""`XL` memory of M tokens, and in one layer ``g o_far + (1 - g) o_near``: a Memorizing Transformer.

    In that layer queries and keys have length 1, and scores are ``exp(s) q . k``, s learned for each head.
    o_near is attention as in any other layer. o_far is the average of the values of the k tokens with the
    largest scores, by a softmax over those alone and without positions, among the tokens of the episode
    that stand more than M and at most M + N tokens back. The gate ``g = sigmoid(w)`` is learned for each
    head; where nothing stands that far back, o_near counts alone.

    Positions say what is far: acting step by step finds what learning in segments finds, however time is cut.
    No gradient flows into the keys and values that are found, of tokens of the same segment neither. A state
    holds the inputs of that one layer for N tokens; they are projected by the weights of the day.

    The k nearest are found exactly, each step among all N: by ``torch.topk``, or with index="faiss" by a flat
    index of faiss for each row and head. What is remembered changes with each step and differs from query to
    query, so there is nothing that an index could prepare: "torch" is the faster one.

    Source: Wu et al. 2022, arXiv:2203.08913, section 3.

    Args:
        length: M, tokens remembered by each layer, at least 1; use the pattern ``Window(M + 1)``.
        far: N, older tokens remembered by one layer.
        top: k, how many of these a query finds.
        layer: that layer, counted from 1; None for the one at three quarters of the depth, as in the paper.
        index: who finds them: "torch", or "faiss" with the extra knn, on the CPU. Both find the same.

    Raises:
        TypeError: if one of them is no whole number.
        ValueError: if one is less than 1, top more than far, or there is no such index.
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
        """See `Memory`: one layer, of its own, whose near part is softmax over what its pattern shows."""
        super().check(choices)
        if type(choices.kernel) is not Softmax:
            raise ValueError(
                f"{self} finds keys by their scores, and {choices.kernel} weighs them otherwise; "
                f"choose Softmax()"
            )
        if isinstance(choices.pattern, GlobalTokens):
            raise ValueError(
                f"{self} has one projection for all tokens of a layer, and {choices.pattern} has two; choose "
                f"another pattern"
            )
        if self.layer is not None and self.layer > choices.layers:
            raise ValueError(f"{self} is for a layer that is not there: there are {choices.layers}")
        depth: Any = choices.depth
        if depth.layer_of(choices.layers - 1) != choices.layers - 1:
            raise ValueError(
                f"{self} is for one pass, and {choices.depth} takes others through the same layer; "
                f"choose Fixed()"
            )

    def number(self, layers: int) -> int:
        """That layer of so many, counted from 0."""
        return (-(-3 * layers // 4) if self.layer is None else self.layer) - 1

    def for_layer(self, number: int, layers: int) -> Memory:
        """See `Memory`."""
        return self if number == self.number(layers) else XL(self.length)

    @property
    def holds(self) -> int:
        """See `Memory`: M + N."""
        return self.length + self.far

    def shows_far(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether the token at position j is far from position i, and not too far."""
        return (i - j > self.length) & (i - j <= self.holds)

    def empty(self, layers: int, batch: int, like: Tensor, width: int) -> State:
        """See `Memory`."""
        older = State.empty(1, batch, self.far, like, width)
        return replace(super().empty(layers, batch, like, width), older=older)

    def recall(self, state: State | None, index: Index, layers: Sequence[Any]) -> KNNRecall:
        """See `Memory`. Older slots before all of these episodes are left out: they may be thousands."""
        if state is not None and state.older is not None:
            state = replace(state, older=state.older.met_by(index))
        return KNNRecall(state, index, self, self.number(len(layers)))

    def __call__(self, state: State, hidden: Tensor, index: Index) -> State:
        """See `Memory`; what drops out of the last M tokens is kept of one layer."""
        after = super().__call__(state, hidden, index)
        one = [self.number(len(hidden))]
        before = [] if state.older is None else [state.older]
        parts = [*before, State(state.hidden[one], state.index), State(hidden[one].detach(), index)]
        whole = joined(parts)
        kept = whole.index.shape[1] - after.index.shape[1]
        return replace(after, older=whole.at(slice(0, kept)).last(self.far))
