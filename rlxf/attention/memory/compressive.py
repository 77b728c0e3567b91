"""Compressive memory: tokens beyond the recent ones are stored with c tokens compressed to one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from torch import Tensor, nn

from rlxf.attention.memory.base import Memory, State
from rlxf.attention.memory.compression import (
    LOSSES,
    MEASURES,
    ContentLayer,
    Loss,
    Measure,
    Method,
    ReconstructionInput,
    attention_received,
    compression,
    restrict_gradient,
)
from rlxf.attention.memory.compressive_cache import CompressiveCache
from rlxf.attention.memory.compressive_view import CompressiveView
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.relative import DistanceTables
from rlxf.attention.technique import SpecView
from rlxf.attention.token_index import TokenIndex
from rlxf.attention.validation import check_choice, check_finite_number, check_int


@dataclass(frozen=True)
class Compressive(Memory):
    r"""Memory in which each block of c tokens older than M tokens is compressed to one: ``f([h_1 ... h_c])``.

    Position t belongs to the block [k c, (k + 1) c) of its episode, which ends at e. A query at position i
    sees token t raw if ``t <= i <= e + M``. It sees the block as one token at position e if
    ``M < i - e <= M + N c``. So each of the last M + N c tokens is visible either raw or compressed.
    Visibility depends on positions only, so acting step by step equals learning in segments of any length.
    A block with missing positions is never compressed; its tokens are dropped once they are no
    longer visible raw. The paper compresses the oldest tokens after each segment. With segments of c tokens
    a segment starts with the same view.

    f maps the c inputs of a layer to one token; keys and values are projected from it as usual.
    The methods are

    - "mean" or "max", per feature;
    - "convolution": kernel size and stride c; "dilated": the same with every second token;
    - "most-used": the token of the block that receives the most content-based attention. The paper
      counts the attention of all queries, but their number depends on the segment boundaries.

    The task loss has no gradient with respect to compressed tokens or f. A convolution is trained by an
    auxiliary loss, summed over layers, whose gradient reaches only the compression module:

    - "attention-reconstruction": ``attn(h, tokens) - attn(h, compressed)``, the difference of content-based
      attention from the segment's queries over the blocks that they see compressed;
    - "auto-encoding": ``tokens - g(compressed)``, with a transposed convolution g.

    A state stores the M + N c + c - 1 original tokens, which a rollout stores anyway. They are
    compressed with the current weights, so memory never becomes stale. The `KVCache` for acting stores M + c
    raw tokens and the compressed blocks.

    Source: Rae et al. 2019, arXiv:1911.05507, sections 3.1 and 3.2.

    Args:
        recent: number of raw tokens M, n_m in the paper; at least 1. A block stays raw until all its
            tokens are older, which adds at most c - 1 raw tokens.
        compressed: number of compressed blocks N, n_cm in the paper.
        ratio: compression ratio c, in tokens per block.
        method: compression function f.
        loss: auxiliary loss of a convolution; the other methods ignore it.
        measure: size of a difference: "mean-square", as in public implementations, or "norm", as in the
            paper. The gradient of a norm grows with the number of queries. It would dominate the task
            gradient where both are clipped jointly, as in PPO.
        loss_coef: coefficient of the auxiliary loss.

    Raises:
        TypeError: if a size is not an int, or loss_coef is not a number.
        ValueError: if a size is less than 1, a name is unknown, or loss_coef is not positive and finite.
    """

    paper: ClassVar[str] = "Rae et al. 2019, arXiv:1911.05507"
    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "recent + compressed pairs per token"
    recent: int = 64
    compressed: int = 64
    ratio: int = 4
    method: Method = "convolution"
    loss: Loss = "attention-reconstruction"
    measure: Measure = "mean-square"
    loss_coef: float = 1.0

    def __post_init__(self) -> None:
        for name in ("recent", "compressed", "ratio"):
            check_int(f"Compressive {name}", getattr(self, name))
        for name, words in (("method", Method), ("loss", Loss), ("measure", Measure)):
            check_choice(f"Compressive {name}", getattr(self, name), get_args(words))
        check_finite_number("Compressive loss_coef", self.loss_coef)
        if self.loss_coef <= 0:
            raise ValueError(f"Compressive loss_coef must be above 0, got {self.loss_coef}")

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless the pattern is `Full` and the kernel is a softmax.

        The memory itself defines the visible tokens, and a softmax weighs raw and compressed tokens alike.
        """
        super().check(choices)
        if not choices.pattern.sees_all:
            raise ValueError(
                f"{self} defines the visible tokens itself, and pattern {choices.pattern} would hide some of "
                f"them; use pattern=Full()"
            )
        if not choices.kernel.softmax_distance:
            raise ValueError(
                f"{self} requires a softmax kernel over raw and compressed tokens, got {choices.kernel}; "
                f"use kernel=Softmax() or another memory"
            )

    @property
    def length(self) -> int:
        """Tokens in a state, M + N c + c - 1: they contain all blocks that are visible to the next token."""
        return self.max_distance + self.ratio - 1

    @property
    def max_distance(self) -> int:
        """Maximum distance, in tokens, to the end of a visible block: M + N c."""
        return self.recent + self.compressed * self.ratio

    @property
    def raw_length(self) -> int:
        """Maximum number of earlier tokens that are visible raw: M + c - 1."""
        return self.recent + self.ratio - 1

    @property
    def waiting(self) -> int:
        """Number of compressed blocks in a cache: the visible ones, and those that will become visible."""
        return self.compressed + self.recent // self.ratio + 1

    def visible_pattern(self, pattern: Pattern) -> Pattern:
        return BlockWindow(self.max_distance, self.ratio)

    def check_gaps(self) -> None:
        """Raise ValueError, since a block with an empty slot is never compressed."""
        raise ValueError(f"{self} would discard every block with an empty slot as incomplete")

    def sees_raw(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether position i sees the token at position j <= i raw."""
        return i - end_of_block(j, self.ratio) <= self.recent

    def sees_compressed(self, i: Tensor, end: Tensor) -> Tensor:
        """Return whether position i sees the compressed block that ends at position ``end``."""
        return (i - end > self.recent) & (i - end <= self.max_distance)

    def build(self, width: int) -> "LayerCompression":
        return LayerCompression(self, width)

    def step_distance(self, capacity: int, pattern: Pattern) -> int:
        return self.max_distance

    def cache(
        self, state: State, capacity: int, layers: Sequence[Any], tables: DistanceTables
    ) -> CompressiveCache:
        return CompressiveCache.from_state(self, layers, state, capacity, tables)

    def view(self, state: State | None, index: TokenIndex, layers: Sequence[Any]) -> CompressiveView:
        return CompressiveView(state, index, self, layers)


@dataclass(frozen=True)
class BlockWindow(Pattern):
    """Pattern of the tokens whose block of ``size`` ends at most ``farthest`` positions before the query."""

    farthest: int
    size: int

    @property
    def max_distance(self) -> int:
        """Maximum distance, to the first token of the farthest block."""
        return self.farthest + self.size - 1

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        return i - end_of_block(j, self.size) <= self.farthest


def end_of_block(position: Tensor, size: int) -> Tensor:
    """Return the last position of the block that contains each position."""
    return position.div(size, rounding_mode="floor") * size + size - 1


class LayerCompression(nn.Module):
    """Compression function f of a `Compressive` memory in one layer, and its auxiliary loss."""

    def __init__(self, spec: Compressive, width: int):
        super().__init__()
        self.spec = spec
        self.compression = compression(spec.method, width, spec.ratio)
        learns = any(True for _ in self.compression.parameters())
        self.reconstruction = LOSSES[spec.loss](width, spec.ratio) if learns else None

    def forward(self, tokens: Tensor, layer: ContentLayer) -> Tensor:
        """Compress blocks of tokens (N, c, C) -> (N, C)."""

        def usage(x: Tensor) -> Tensor:
            return attention_received(layer.content_query(x), layer.content(x)[0])

        y: Tensor = self.compression(tokens, usage)
        return y[:, 0]

    def penalty(self, compressed: ReconstructionInput) -> Tensor | None:
        """Return the auxiliary loss of one pass, whose gradient reaches only this module.

        None if the method has no parameters, 0 if no query sees a compressed block: all ranks of a process
        group must compute the same terms of the loss.
        """
        if self.reconstruction is None:
            return None
        if not bool(compressed.seen.any()):
            return compressed.summaries.new_zeros(())
        loss = MEASURES[self.spec.measure](self.reconstruction(compressed))
        return restrict_gradient(self.spec.loss_coef * loss, self.parameters())
