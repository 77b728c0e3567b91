"""Patterns that assign one of two patterns to each head, or to each layer."""

from dataclasses import dataclass
from functools import reduce
from operator import or_

from torch import Tensor

from rlxf.attention.patterns.base import CombinedPattern, Either, Pattern, repeat_for_heads
from rlxf.attention.technique import SpecView, check_layer_numbers
from rlxf.utils.checks import check_int


@dataclass(frozen=True)
class _Assigned(Either):
    """Pattern in which a head of a layer uses one of two patterns; its rule is their union."""

    allows_all_keys = CombinedPattern.allows_all_keys


@dataclass(frozen=True)
class HeadPatterns(_Assigned):
    """The pattern ``second`` in the last ``heads`` heads, ``first`` in the others.

    With the kernel `HeadKernels` some heads can route among all tokens while the others attend to a window.

    Args:
        first: pattern of the first heads.
        second: pattern of the last heads.
        heads: number of heads with the second pattern.

    Raises:
        TypeError: if first or second is not a pattern, or heads is not an integer.
        ValueError: if a pattern has separate projections for global tokens, or heads is less than 1; in a
            spec, if no head is left for the first pattern.
    """

    heads: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("HeadPatterns heads", self.heads)

    def check(self, choices: SpecView) -> None:
        """Check both patterns, and raise ValueError unless each has a head."""
        super().check(choices)
        check_leaves_heads(f"{self}", self.heads, choices.heads)

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        number = max(0, heads - self.heads)
        first, second = (
            repeat_for_heads(pattern.for_heads(heads), heads) for pattern in (self.first, self.second)
        )
        return first[:number] + second[number:]


@dataclass(frozen=True)
class LayerPatterns(_Assigned):
    """The pattern ``second`` in some layers, ``first`` in the others.

    Args:
        first: pattern of the other layers.
        second: pattern of the given layers.
        layers: numbers of the layers with the second pattern, from 0.

    Raises:
        TypeError: if first or second is not a pattern, or the number of a layer is not an integer.
        ValueError: if a pattern has separate projections for global tokens, or layers is empty or has a
            negative number or a number twice; in a spec, if a layer does not exist, or no layer with
            attention is left for one of the patterns.
    """

    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", check_layer_numbers("LayerPatterns layers", self.layers))

    def check(self, choices: SpecView) -> None:
        """Check both patterns, and raise ValueError unless each has a layer."""
        super().check(choices)
        check_leaves_layers(f"{self}", self.layers, choices.layers)
        check_layers_with_attention(f"{self}", self.layers, choices)

    def for_layer(self, layer: int) -> Pattern:
        return (self.second if layer in self.layers else self.first).for_layer(layer)

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        """Return the union of both patterns; the rules of a layer are those of its own pattern."""
        return Either(self.first, self.second).for_heads(heads)


@dataclass(frozen=True)
class HeadRules(Pattern):
    """Pattern with a given rule for each head, for a part of the heads of a pattern that assigns rules."""

    rules: tuple[Pattern, ...]

    @property
    def max_distance(self) -> int:
        """The largest distance of the rules."""
        return max(rule.max_distance for rule in self.rules)

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether a rule allows the pair."""
        return reduce(or_, (rule.mask_mod(i, j) for rule in self.rules))

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        return self.rules


def check_leaves_heads(chosen: str, second: int, heads: int) -> None:
    """Raise ValueError unless the first of two choices has a head, if ``second`` heads have the other."""
    if second >= heads:
        fewer = f"fewer than {heads}, or " if heads > 1 else ""
        raise ValueError(
            f"{chosen} leaves no head for its first choice, because the transformer has heads={heads}; use "
            f"{fewer}the second choice alone"
        )


def check_leaves_layers(chosen: str, second: tuple[int, ...], layers: int) -> None:
    """Raise ValueError unless layers ``second`` exist, and others are left for the first of two choices."""
    if max(second) >= layers or len(second) == layers:
        raise ValueError(
            f"{chosen} needs layers from 0 to {layers - 1}, but not all of them, because the transformer has "
            f"layers={layers}; list other layers, or use one of its choices alone"
        )


def check_layers_with_attention(chosen: str, second: tuple[int, ...], choices: SpecView) -> None:
    """Raise ValueError if all layers of one of two choices have a recurrence in place of attention."""
    attention = {n for n in range(choices.distinct_layers) if not choices.is_recurrent(n)}
    if choices.has_recurrence and attention and len(attention & set(second)) in (0, len(attention)):
        raise ValueError(
            f"one of the choices of {chosen} has no effect with attention_layers={choices.attention_layers}, "
            f"because all of its layers have the recurrence {choices.recurrence}; list a layer of each "
            f"choice in attention_layers, or use the other choice alone"
        )
