"""Compressive memory: tokens beyond the recent ones are stored with c tokens compressed to one."""

from dataclasses import dataclass
from typing import ClassVar, get_args

from rlxf.attention.memory.block_memory import BlockMemory
from rlxf.attention.memory.compression import LayerCompression, Loss, Measure, Method
from rlxf.attention.technique import SpecView
from rlxf.utils.checks import check_choice, check_int, check_positive


@dataclass(frozen=True)
class Compressive(BlockMemory):
    r"""Memory in which each block of c tokens older than M tokens is compressed to one: ``f([h_1 ... h_c])``.

    Position t belongs to the block [k c, (k + 1) c) of its episode, which ends at e. A query at position i
    attends to token t raw if ``t <= i <= e + M``. It attends to the block as one token at position e if
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
      attention from the segment's queries over the compressed blocks that they attend to;
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
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "(recent + compressed) pairs per token"
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
        check_positive("Compressive loss_coef", self.loss_coef)

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless the pattern is `Full` and the kernel is a softmax.

        The memory itself defines the visible tokens, and a softmax weighs raw and compressed tokens alike.
        """
        super().check(choices)
        self.check_attention_everywhere(choices)
        self.check_full_pattern(choices)
        if not choices.kernel.softmax_distance:
            raise ValueError(
                f"{self} requires a softmax kernel over raw and compressed tokens, got {choices.kernel}; "
                f"use kernel=Softmax() or another memory"
            )

    def check_gaps(self) -> None:
        """Raise ValueError, since a block with an empty slot is never compressed."""
        raise ValueError(f"{self} would discard every block with an empty slot as incomplete")

    def build(self, width: int) -> LayerCompression:
        return LayerCompression(width, self.ratio, self.method, self.loss, self.measure, self.loss_coef)
