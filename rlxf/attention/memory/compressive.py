"""Compressive memory: what is older than the last tokens is kept, c tokens in the room of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from torch import Tensor, nn

from rlxf.attention.checks import check_finite_number, check_whole, check_word
from rlxf.attention.index import Index
from rlxf.attention.kernels.adaptive_span import AdaptiveSpan
from rlxf.attention.kernels.dynamic_span import DynamicSpan
from rlxf.attention.kernels.softmax import Softmax
from rlxf.attention.memory.base import Memory
from rlxf.attention.memory.compression import Method, attention_received, compression
from rlxf.attention.memory.compressive_recall import CompressiveRecall
from rlxf.attention.memory.reconstruction import (
    LOSSES,
    MEASURES,
    Compressed,
    Content,
    Loss,
    Measure,
    reaching_only,
)
from rlxf.attention.memory.state import State
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.patterns.full import Full
from rlxf.attention.technique import Choices


@dataclass(frozen=True)
class Compressive(Memory):
    r"""Blocks of c tokens that are older than M tokens are each seen as one: ``f([h_1 ... h_c])``.

    Position t is in the block [k c, (k + 1) c) of its episode, which ends at e. A token at position i sees
    token t by itself if ``t <= i <= e + M``; the block as one, standing at e, if ``M < i - e <= M + N c``.
    So each of the last M + N c tokens is seen, raw or compressed and never both. Positions alone decide:
    acting step by step sees what learning in segments sees, however time is cut. Only a block that lacks a
    token, as positions within an episode were left out, is never compressed: it is forgotten once it is no
    longer seen raw. In the paper the oldest tokens are compressed behind each segment; a segment of c tokens
    begins with the same view.

    f makes one token of the c inputs of a layer; keys and values are projected from it as from any other.
    It is one of

    - "mean" or "max", feature by feature;
    - "convolution": kernel and stride are c; "dilated": the same with every second token;
    - "most-used": the token that gets the most attention, by content alone, of those of its block. The paper
      counts the attention of all queries; how many there have been depends on how time is cut.

    No gradient of the task flows into what is compressed, or into f. A convolution learns by a loss whose
    gradient reaches nothing else, added up over the layers:

    - "attention-reconstruction": ``attn(h, tokens) - attn(h, compressed)``, what the queries of a segment
      find in blocks that they see compressed, by content alone;
    - "auto-encoding": ``tokens - g(compressed)``, g a transposed convolution.

    A state holds the tokens themselves, M + N c + c - 1 of them, as a rollout does anyway: they are
    compressed by the weights of the day, and nothing grows stale. What acts, a `Cache`, holds M + c raw ones
    and the compressed.

    Source: Rae et al. 2019, arXiv:1911.05507, sections 3.1 and 3.2.

    Args:
        recent: M, the paper's n_m: tokens seen by themselves, at least 1. A block that is not yet older than
            that as a whole is still seen raw: c - 1 more at most.
        compressed: N, the paper's n_cm: blocks seen as one token.
        ratio: c, tokens in a block.
        method: f.
        loss: what a convolution learns by; without a meaning for the others.
        measure: how large a difference is: "mean-square", as in public code, or "norm", as in the paper. The
            gradient of a norm grows with the number of queries, and would take the room of the task's
            where gradients are clipped together, as PPO's are.
        loss_coef: what the loss is multiplied with.

    Raises:
        TypeError: if a size is no whole number, or loss_coef no number.
        ValueError: if a size is less than 1, a word unknown, or loss_coef not above 0 and finite.
    """

    paper: ClassVar[str] = "Rae et al. 2019, arXiv:1911.05507"
    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "recent + compressed pairs a token"
    recent: int = 64
    compressed: int = 64
    ratio: int = 4
    method: Method = "convolution"
    loss: Loss = "attention-reconstruction"
    measure: Measure = "mean-square"
    loss_coef: float = 1.0

    def __post_init__(self) -> None:
        for name in ("recent", "compressed", "ratio"):
            check_whole(f"Compressive {name}", getattr(self, name))
        for name, words in (("method", Method), ("loss", Loss), ("measure", Measure)):
            check_word(f"Compressive {name}", getattr(self, name), get_args(words))
        check_finite_number("Compressive loss_coef", self.loss_coef)
        if self.loss_coef <= 0:
            raise ValueError(f"Compressive loss_coef must be above 0, got {self.loss_coef}")

    def check(self, choices: Choices) -> None:
        """See `Memory`: it decides what is seen, and a softmax weighs raw and compressed tokens alike."""
        super().check(choices)
        if not isinstance(choices.pattern, Full):
            raise ValueError(
                f"{self} decides itself how far a token sees, and {choices.pattern} hides a part of that; "
                f"choose Full()"
            )
        if not isinstance(choices.kernel, Softmax | AdaptiveSpan | DynamicSpan):
            raise ValueError(
                f"{self} is read by softmax over raw and compressed tokens, and {choices.kernel} is not "
                f"that; choose Softmax() or another memory"
            )

    @property
    def length(self) -> int:
        """See `Memory`: M + N c + c - 1, with all of the blocks that the next token sees."""
        return self.reach + self.ratio - 1

    @property
    def reach(self) -> int:
        """Distance, in tokens, up to which the end of a block is seen: M + N c."""
        return self.recent + self.compressed * self.ratio

    @property
    def raw(self) -> int:
        """Tokens before it that a token may see by themselves: M + c - 1."""
        return self.recent + self.ratio - 1

    @property
    def waiting(self) -> int:
        """Whole blocks that are kept compressed while acting: those that are seen, and those that will be."""
        return self.compressed + self.recent // self.ratio + 1

    def shows(self, pattern: Pattern) -> Pattern:
        """See `Memory`."""
        return UpToBlock(self.reach, self.ratio)

    def shows_token(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether position i sees the token at position j, which is not ahead, by itself."""
        return i - end_of_block(j, self.ratio) <= self.recent

    def shows_summary(self, i: Tensor, end: Tensor) -> Tensor:
        """Whether position i sees as one the block that ends at position ``end``."""
        return (i - end > self.recent) & (i - end <= self.reach)

    def build(self, width: int) -> "LayerCompression":
        """See `Memory`."""
        return LayerCompression(self, width)

    def recall(self, state: State | None, index: Index, layers: Sequence[Any]) -> CompressiveRecall:
        """See `Memory`."""
        return CompressiveRecall(state, index, self, layers)


@dataclass(frozen=True)
class UpToBlock(Pattern):
    """Tokens whose block, of ``size``, ends no farther than ``farthest`` behind the query."""

    farthest: int
    size: int

    @property
    def reach(self) -> int:
        """To the first token of that block."""
        return self.farthest + self.size - 1

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """See `Pattern`."""
        return i - end_of_block(j, self.size) <= self.farthest


def end_of_block(position: Tensor, size: int) -> Tensor:
    """The last position of the block that a position is in."""
    return position.div(size, rounding_mode="floor") * size + size - 1


class LayerCompression(nn.Module):
    """f of a `Compressive` in one layer, and what it learns by."""

    def __init__(self, spec: Compressive, width: int):
        super().__init__()
        self.spec = spec
        self.compression = compression(spec.method, width, spec.ratio)
        learns = any(True for _ in self.compression.parameters())
        self.reconstruction = LOSSES[spec.loss](width, spec.ratio) if learns else None

    def forward(self, tokens: Tensor, layer: Content) -> Tensor:
        """Blocks of tokens (N, c, C) -> (N, C)."""

        def usage(x: Tensor) -> Tensor:
            return attention_received(layer.content_query(x), layer.content(x)[0])

        y: Tensor = self.compression(tokens, usage)
        return y[:, 0]

    def penalty(self, compressed: Compressed) -> Tensor | None:
        """What one pass adds to the loss; its gradient reaches this module alone. None if nothing learns.

        Where nobody sees anything compressed it is 0: processes that learn together, of which one may see
        something, must agree on the parts of a loss.
        """
        if self.reconstruction is None:
            return None
        if not bool(compressed.seen.any()):
            return compressed.summaries.new_zeros(())
        loss = MEASURES[self.spec.measure](self.reconstruction(compressed))
        return reaching_only(self.spec.loss_coef * loss, self.parameters())
