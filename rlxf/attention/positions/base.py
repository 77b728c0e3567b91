"""Base classes of position techniques, and the modules that they build."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.base import AttentionKernel
from rlxf.attention.technique import SpecView, Technique
from rlxf.attention.token_index import is_tracing
from rlxf.utils.checks import check_finite_number, check_int

AverageFn = Callable[[Tensor, Tensor, Tensor, Tensor | None, AttentionMask], Tensor]
"""Function of q, k, v, bias and mask with the interface of `AttentionKernel.forward`."""


StepEncoder = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function of queries q (B, H, D), columns (B, 1, S) of the slots in the distance table, and the table.

It returns the encoded queries (B, H, D) and the bias on the scores (B, H, S), like `LayerPosition.encode`.
Keys must not depend on their position.
"""


class PositionEmbedding(nn.Module):
    """Part of a position technique that all layers share: input embedding or score bias.

    By default it does nothing. A technique overrides the methods that it needs.
    """

    gather_cost: ClassVar[float] = 1.0
    """Cost of a pair with gathered keys, relative to its cost where all pairs are computed."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """Add the embedding of position (B, T) int64, 0 for empty slots, to x (B, T, C)."""
        return x

    def pass_embedding(self, x: Tensor, position: Tensor, pass_index: int) -> Tensor | None:
        """Return the term added to x (B, T, C) before a pass, counted from 0; None for none."""
        return None

    def table(self, distances: Tensor, causal: bool) -> Tensor | None:
        """Return tensors that all layers share and that do not depend on tokens.

        They are computed once per pass, or once for many acting steps.
        """
        return None

    def bias(self, mask: AttentionMask) -> Tensor | None:
        """Return the bias on the scores of every layer, (B or 1, H, Tq, Tk), or None.

        ``mask.relative.shared`` is the result of `table`.
        """
        return None


class LayerPosition(nn.Module):
    """Part of a position technique in the attention of one layer. By default it does nothing.

    A technique overrides the methods that it needs. Keys are cached after `key`, so a key may depend only on
    its own position; terms that depend on the pair belong in `bias`.
    """

    def init_scores(self) -> None:
        """Set the initial scores of distances, without random numbers; by default do nothing.

        The constructor calls it, and so do models that initialize all linear layers again.
        """

    def query(self, q: Tensor, position: Tensor) -> Tensor:
        """Transform queries q (B, H, T, D) at position (B, T) before they are compared with keys."""
        return q

    def key(self, k: Tensor, position: Tensor) -> Tensor:
        """Transform keys k (B, H, T, D) at position (B, T) before they are cached."""
        return k

    def table(self, distances: Tensor, shared: Tensor | None) -> Tensor | None:
        """Return tensors that depend only on distances (R,), or None.

        They are computed once per pass, or once for many acting steps. ``shared`` is the result of
        `PositionEmbedding.table`.
        """
        return None

    def pass_table(self, mask: AttentionMask) -> Tensor | None:
        """Return `table` for all distances of a pass; None if the scores do not depend on pairs."""
        return None

    def bias(self, q: Tensor, k: Tensor, mask: AttentionMask, table: Tensor | None) -> Tensor | None:
        """Return the bias on the scores; None for none.

        q (B, H, Tq, D) before `query`, k (B, H, Tk, D) after `key` -> (B or 1, H, Tq, Tk).
        """
        return None

    def encode(
        self, q: Tensor, k: Tensor, size: int, mask: AttentionMask, table: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return position-encoded queries and the bias on the scores.

        Args:
            q: queries, (B, H, Tq, D + E). The last E features belong to the kernel and stay unchanged.
            k: keys after `key`, (B, H, Tk, D + F), with F features of the kernel.
            size: D, features of a head.
            mask: attention mask.
            table: result of `table` for the distances of the mask.
        """
        content = q[..., :size]
        bias = self.bias(content, k[..., :size], mask, table)
        encoded = self.query(content, mask.query.position)
        return encoded if q.shape[-1] == size else torch.cat([encoded, q[..., size:]], dim=-1), bias

    def required_heads(self, heads: slice | list[int]) -> slice | list[int]:
        """Return the heads whose queries and keys `bias` needs, if only some heads are computed."""
        return heads

    def fused_step(self) -> StepEncoder | None:
        """Return the encoding of one query per row for a `FusedStep`; None, the default, if there is none."""
        return None

    def value_average(self, kernel: AttentionKernel, table: Tensor | None) -> AverageFn:
        """Return the function that averages the values of the keys: by default the kernel.

        Overridden by techniques whose values depend on the distance.
        """
        return kernel


class PairwiseLayerPosition(LayerPosition):
    """Part of a `PairwisePosition` in the attention of one layer.

    By default it adds the bias that all layers share.
    """

    def pass_table(self, mask: AttentionMask) -> Tensor | None:
        return self.table(mask.relative.distances, mask.relative.shared)

    def bias(self, q: Tensor, k: Tensor, mask: AttentionMask, table: Tensor | None) -> Tensor | None:
        return mask.bias

    def required_heads(self, heads: slice | list[int]) -> slice:
        """Return all heads: the bias is computed for all heads at once."""
        return slice(None)


class Position(Technique):
    """Base of the position techniques: frozen dataclasses that build the two modules.

    As in every technique, ``causal_form`` says whether the causal form is the paper's or rlxf's, and ``cost``
    is the additional cost in the length L.
    """

    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L"

    @property
    def max_positions(self) -> int | None:
        """Number of positions, in tokens, from 0; None if unlimited."""
        return None

    def check_unlimited(self) -> None:
        """Raise ValueError unless positions have no limit and a cost that does not depend on the position."""
        if self.max_positions is not None:
            raise ValueError(f"{self} has a limit")

    @property
    def changes_values(self) -> bool:
        """True if the values that a query averages depend on their distances."""
        return False

    def check_without_attention(self) -> None:
        """Raise ValueError if the position has an effect in attention only."""
        raise ValueError(f"position {self} has an effect in attention only")

    def build_embedding(self, width: int, heads: int) -> PositionEmbedding:
        """Return the module that all layers share."""
        return PositionEmbedding()

    def build_shared(self, choices: SpecView) -> PositionEmbedding:
        """Return `build_embedding` for a transformer; overridden where it depends on the layers."""
        return self.build_embedding(choices.width, choices.score_heads)

    def distance_module(self, embedding: PositionEmbedding) -> PositionEmbedding | None:
        """Return the shared module if its `table` and `bias` depend on distances; by default None."""
        return None

    def build(self, width: int, heads: int) -> LayerPosition:
        """Return the module in the attention of one layer."""
        return LayerPosition()


class PairwisePosition(Position):
    """Base of the techniques that change the score or the value of each pair of tokens.

    They require a kernel that computes each pair: a `PairwiseKernel`.
    """

    cost: ClassVar[str] = "visible pairs"

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless the kernel computes each pair."""
        kernel: Any = choices.kernel
        kernel.check_pairwise(self)

    def distance_module(self, embedding: PositionEmbedding) -> PositionEmbedding:
        return embedding

    def build(self, width: int, heads: int) -> PairwiseLayerPosition:
        return PairwiseLayerPosition()


class SinusoidPosition(Position):
    """Base of the techniques that encode positions or distances in a sine and a cosine for each frequency.

    Raises:
        ValueError: if base is not above 1 or not finite; in a spec, if the width is odd.
    """

    base: float

    def __post_init__(self) -> None:
        check_base(type(self).__name__, self.base)

    def check(self, choices: SpecView) -> None:
        super().check(choices)
        if choices.width % 2:
            raise ValueError(f"{type(self).__name__} needs an even width, got {choices.width}")

    def waves(self, position: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return sines and cosines, (..., width / 2) float64 each, of position (...)."""
        angle = position[..., None] * frequencies(width, self.base, position.device)
        return angle.sin(), angle.cos()

    def encode(self, position: Tensor, width: int) -> Tensor:
        """Return the encoding (..., width) of position (...), float64; sines and cosines alternate."""
        return torch.stack(self.waves(position, width), dim=-1).flatten(-2)


def frequencies(width: int, base: float, device: torch.device | None = None) -> Tensor:
    """Return ``base^(-2m / width)`` for m = 0 ... width / 2 - 1, float64."""
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    return base**-exponent


def rotate_pairs(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate pairs of adjacent features of x (..., D) by angles (..., D / 2) float64."""
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def check_base(technique: str, base: float) -> None:
    """Raise TypeError or ValueError unless ``base`` can be the base of `frequencies`."""
    check_finite_number(f"{technique} base", base)
    if base <= 1:
        raise ValueError(f"{technique} base must be above 1, got {base}")


def last_position(position: Tensor) -> int:
    """Return the largest position.

    Raises:
        ValueError: if a position is negative.
    """
    first, last = torch.stack(position.aminmax()).tolist()  # read together
    if first < 0:
        raise ValueError(f"positions count the steps of an episode from 0, got {first}")
    return int(last)


class LearnedPosition(Position):
    """Base of the techniques with one learned vector for each of ``max_length`` positions.

    Raises:
        TypeError: if max_length is not an integer.
        ValueError: if max_length is less than 1.
    """

    max_length: int

    def __post_init__(self) -> None:
        check_int(f"{type(self).__name__} max_length", self.max_length)

    @property
    def max_positions(self) -> int:
        """Number of vectors."""
        return self.max_length

    def check_positions(self, position: Tensor, counted: str = "") -> None:
        """Raise ValueError unless each position has a vector; those of empty slots must be 0.

        ``counted`` is appended to the message: it names what is counted in addition to the tokens of an
        episode. While tracing, nothing is checked.
        """
        if is_tracing():
            return
        last = last_position(position)
        if last >= self.max_length:
            raise ValueError(
                f"position {last} has no vector: {self} has {self.max_length} positions from 0{counted}; "
                f"raise max_length or choose a relative position"
            )
