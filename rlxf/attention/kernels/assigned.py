"""Kernels that assign one of two kernels to each head, or to each layer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.base import AttentionKernel, Kernel, LinearFn, PairwiseKernel
from rlxf.attention.patterns.assigned import (
    HeadRules,
    check_layers_with_attention,
    check_leaves_heads,
    check_leaves_layers,
)
from rlxf.attention.patterns.base import repeat_for_heads
from rlxf.attention.positions.base import LayerPosition
from rlxf.attention.sparse.attention import sparse_average
from rlxf.attention.technique import SpecView, Technique, check_layer_numbers
from rlxf.utils.checks import check_int


@dataclass(frozen=True)
class _Assigned(Kernel):
    """Combination of two kernels.

    Raises:
        TypeError: if an operand is not a kernel.
    """

    paper: ClassVar[str] = ""
    first: Kernel
    second: Kernel

    def __post_init__(self) -> None:
        for kernel in self.both:
            if not isinstance(kernel, Kernel):
                raise TypeError(f"a kernel can only be combined with another kernel, got {kernel!r}")

    @property
    def both(self) -> tuple[Kernel, Kernel]:
        """Both kernels."""
        return self.first, self.second

    def check(self, choices: SpecView) -> None:
        """Check both kernels."""
        for kernel in self.both:
            kernel.check(choices)

    def check_no_redraw(self) -> None:
        for kernel in self.both:
            kernel.check_no_redraw()

    def check_processes(self, count: int) -> None:
        for kernel in self.both:
            kernel.check_processes(count)

    def check_pairwise(self, position: Technique) -> None:
        for kernel in self.both:
            kernel.check_pairwise(position)

    @property
    def token_loss_option(self) -> str | None:
        return next((each for kernel in self.both if (each := kernel.token_loss_option)), None)

    @property
    def softmax_distance(self) -> int:
        """The smaller of the two distances."""
        return min(kernel.softmax_distance for kernel in self.both)


@dataclass(frozen=True)
class LayerKernels(_Assigned):
    """The kernel ``second`` in some layers, ``first`` in the others.

    `Routing` in the last two of six layers, as in its paper, is ``LayerKernels(Softmax(), Routing(), (4,
    5))``. While acting, layers with a `RecurrentKernel` use running sums; the other layers use cached keys
    and values.

    Args:
        first: kernel of the other layers.
        second: kernel of the given layers.
        layers: numbers of the layers with the second kernel, from 0.

    Raises:
        TypeError: if first or second is not a kernel, or the number of a layer is not an integer.
        ValueError: if layers is empty or has a negative number or a number twice; in a spec, if a layer does
            not exist, no layer with attention is left for one of the kernels, or the kernels compute
            different numbers of attention maps.
    """

    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", check_layer_numbers("LayerKernels layers", self.layers))

    def check(self, choices: SpecView) -> None:
        """Check both kernels, and raise ValueError unless each has a layer and as many attention maps."""
        super().check(choices)
        check_layers_with_attention(f"{self}", self.layers, choices)
        first, second = (kernel.score_heads(choices.heads) for kernel in self.both)
        if first != second:
            raise ValueError(
                f"layers share attention masks and positions, but with heads={choices.heads}, {self.first} "
                f"computes {first} attention maps and {self.second} computes {second}; use kernels with as "
                f"many maps, e.g. Differential() in all layers"
            )

    def score_heads(self, heads: int) -> int:
        return self.first.score_heads(heads)

    def build(self, width: int, heads: int) -> AttentionKernel:
        """Return the module of the first kernel; `for_layers` gives the kernel of each layer."""
        return self.first.build(width, heads)

    def for_layers(self, layers: int) -> tuple[Kernel, ...]:
        check_leaves_layers(f"{self}", self.layers, layers)
        first, second = (kernel.for_layers(layers) for kernel in self.both)
        return tuple(second[n] if n in self.layers else first[n] for n in range(layers))


@dataclass(frozen=True)
class HeadKernels(_Assigned, PairwiseKernel):
    """The kernel ``second`` in the last ``heads`` heads, ``first`` in the others.

    Half of the heads of the Routing Transformer route, and the others are local: with four heads it is
    ``HeadKernels(Softmax(), Routing(), 2)`` and the pattern ``HeadPatterns(Window(257), Full(), 2)``.

    Source: Roy et al. 2021, arXiv:2003.05997, section 5 (routing in half of the heads).

    Args:
        first: kernel of the first heads.
        second: kernel of the last heads.
        heads: number of heads with the second kernel.

    Raises:
        TypeError: if first or second is not a kernel, or heads is not an integer.
        ValueError: if a kernel does not compute each pair of tokens with separate queries and keys, or heads
            is less than 1; in a spec, if no head is left for the first kernel.
    """

    heads: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("HeadKernels heads", self.heads)
        for kernel in self.both:
            if not isinstance(kernel, PairwiseKernel) or kernel.replaces_attention:
                raise ValueError(
                    f"HeadKernels needs kernels that compute each pair of tokens from separate queries and "
                    f"keys, and {kernel} does not; use Softmax, SinkSoftmax, AdaptiveSpan, DynamicSpan or "
                    f"Routing, or LayerKernels"
                )

    def check(self, choices: SpecView) -> None:
        """Check both kernels, and raise ValueError unless each has a head."""
        super().check(choices)
        check_leaves_heads(f"{self}", self.heads, choices.heads)

    def for_layers(self, layers: int) -> tuple[Kernel, ...]:
        pairs = zip(*(kernel.for_layers(layers) for kernel in self.both), strict=True)
        return tuple(replace(self, first=first, second=second) for first, second in pairs)

    def build(self, width: int, heads: int) -> "HeadKernelAttention":
        return HeadKernelAttention(self, width, heads)


class HeadKernelAttention(AttentionKernel):
    """Module of `HeadKernels` in one layer.

    The features of a query or key are its D features, then the extras of `query_extras`, then those of
    `projected_query_extras`, each padded to the larger of the numbers of the two parts.
    """

    def __init__(self, spec: HeadKernels, width: int, heads: int):
        super().__init__()
        number = heads - spec.heads
        self.slices = slice(0, number), slice(number, heads)
        self.size = width // heads
        modules = (
            spec.first.build_part(width, heads, number),
            spec.second.build_part(width, heads, spec.heads),
        )
        self.parts = nn.ModuleList(modules)
        self.query_sizes, self.key_sizes = self._count_extras(width, heads)

    @torch.no_grad()
    def _count_extras(self, width: int, heads: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the numbers of both kinds of extra features of each part, for queries and for keys."""
        x = torch.zeros(1, 1, width)
        projected = torch.zeros(1, heads, 1, self.size)
        queries, keys = [], []
        for part, part_heads in self._parts():
            heads_of_part = projected[:, part_heads]
            queries.append((_width(part.query_extras(x)), _width(part.projected_query_extras(heads_of_part))))
            keys.append((_width(part.key_extras(x)), _width(part.projected_key_extras(heads_of_part))))
        return queries, keys

    def _parts(self) -> Iterator[tuple[AttentionKernel, slice]]:
        """Yield each part and its heads."""
        for part, heads in zip(self.parts, self.slices, strict=True):
            assert isinstance(part, AttentionKernel)
            yield part, heads

    @property
    def dropout(self) -> float:
        """Dropout probability of attention weights, the same in both parts."""
        return next(part for part, _ in self._parts()).dropout

    @dropout.setter
    def dropout(self, probability: float) -> None:
        for part, _ in self._parts():
            part.dropout = probability

    def query_extras(self, x: Tensor) -> Tensor | None:
        return self._merge([part.query_extras(x) for part, _ in self._parts()], x)

    def key_extras(self, x: Tensor, linear: LinearFn = F.linear) -> Tensor | None:
        return self._merge([part.key_extras(x, linear) for part, _ in self._parts()], x)

    def projected_query_extras(self, q: Tensor) -> Tensor | None:
        return self._merge([part.projected_query_extras(q[:, heads]) for part, heads in self._parts()], q)

    def projected_key_extras(self, k: Tensor) -> Tensor | None:
        return self._merge([part.projected_key_extras(k[:, heads]) for part, heads in self._parts()], k)

    def _merge(self, extras: list[Tensor | None], like: Tensor) -> Tensor | None:
        """Concatenate the extras (B, heads, T, E) of both parts along the heads, with zeros for padding."""
        width = max(map(_width, extras))
        if width == 0:
            return None
        batch, length = like.shape[0], like.shape[-2]
        counts = (heads.stop - heads.start for heads in self.slices)
        none = [like.new_zeros(batch, count, length, 0) for count in counts]
        present = [blank if extra is None else extra for extra, blank in zip(extras, none, strict=True)]
        return torch.cat([F.pad(extra, (0, width - extra.shape[-1])) for extra in present], dim=1)

    def _split(self, x: Tensor, sizes: list[tuple[int, int]]) -> list[Tensor]:
        """Return the features (B, heads, T, D + E) of each part."""
        start = self.size + max(size for size, _ in sizes)
        return [
            torch.cat([x[:, heads, :, : self.size + before], x[:, heads, :, start : start + after]], dim=-1)
            for heads, (before, after) in zip(self.slices, sizes, strict=True)
        ]

    def transform_in_context(self, q: Tensor, k: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """Call the method of both parts for its side effects; queries and keys stay unchanged.

        An example of a side effect is the update of the cluster centers of `Routing`.
        """
        for (part, _), q_part, k_part, rules in self._inputs(q, k, mask):
            part.transform_in_context(q_part, k_part, rules)
        return q, k

    def _inputs(
        self, q: Tensor, k: Tensor, mask: AttentionMask
    ) -> Iterator[tuple[tuple[AttentionKernel, slice], Tensor, Tensor, AttentionMask]]:
        """Yield each part with its heads, queries, keys and mask."""
        queries, keys = self._split(q, self.query_sizes), self._split(k, self.key_sizes)
        masks = mask.once(SplitHeads(self.slices[1].start))
        return iter(zip(self._parts(), queries, keys, masks, strict=True))

    def allows_gathering(self, mask: AttentionMask) -> bool:
        """Return False: each part gathers the keys of its own heads."""
        return False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: AttentionMask) -> Tensor:
        outputs = [
            _average(part, q_part, k_part, v[:, heads], _of_heads(bias, heads), rules)
            for (part, heads), q_part, k_part, rules in self._inputs(q, k, mask)
        ]
        return torch.cat(outputs, dim=1)

    def inspect_weights(self, q: Tensor, k: Tensor, bias: Tensor | None, mask: AttentionMask) -> Tensor:
        return self._weights(lambda part: part.inspect_weights, q, k, bias, mask)

    def weights(self, q: Tensor, k: Tensor, bias: Tensor | None, mask: AttentionMask) -> Tensor:
        return self._weights(lambda part: part.weights, q, k, bias, mask)

    def _weights(
        self,
        method: Callable[[AttentionKernel], Callable[..., Tensor]],
        q: Tensor,
        k: Tensor,
        bias: Tensor | None,
        mask: AttentionMask,
    ) -> Tensor:
        """Return the weights of both parts, (B, H, Tq, Tk)."""
        parts = self._inputs(q, k, mask)
        return torch.cat(
            [
                method(part)(q_part, k_part, _of_heads(bias, heads), rules)
                for (part, heads), q_part, k_part, rules in parts
            ],
            dim=1,
        )

    @property
    def max_distance(self) -> int:
        """The larger of the two distances."""
        return max(part.max_distance for part, _ in self._parts())


@dataclass(frozen=True)
class SplitHeads:
    """Function that returns the masks of the first ``number`` heads and of the others.

    A mask with one head, such as that of a context, holds for all heads.
    """

    number: int

    def __call__(self, mask: AttentionMask) -> tuple[AttentionMask, AttentionMask]:
        if mask.heads == 1:
            return mask, mask
        rules = repeat_for_heads(mask.pattern.for_heads(mask.heads), mask.heads)
        parts = rules[: self.number], rules[self.number :]
        first, second = (replace(mask, pattern=HeadRules(part), heads=len(part)) for part in parts)
        return first, second


def _average(
    part: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: AttentionMask
) -> Tensor:
    """Compute the output of some heads, block-sparse where that is faster, (B, heads, Tq, V)."""
    if bias is not None or not part.allows_gathering(mask) or mask.sparse_plan is None:
        return part(q, k, v, bias, mask)
    return sparse_average(part, LayerPosition(), (q, k, v), v.shape[-1], mask)


def _of_heads(bias: Tensor | None, heads: slice) -> Tensor | None:
    """Select heads of a bias (B, 1 or H, Tq, Tk)."""
    return bias if bias is None or bias.shape[1] == 1 else bias[:, heads]


def _width(extras: Tensor | None) -> int:
    """Return the number of extra features."""
    return 0 if extras is None else extras.shape[-1]
