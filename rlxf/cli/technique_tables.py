"""Table of incompatible pairs of techniques, and images of attention patterns."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.table import Table

from rlxf.attention import TransformerSpec
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.registry import OPTIONAL, TECHNIQUES
from rlxf.cli.output import print_out
from rlxf.cli.spec_options import FIT_MEMORY, NONE, parse_technique


@dataclass(frozen=True)
class Pair:
    """Two techniques of different axes, with their default options.

    Args:
        names: axis and name of both techniques.
        refusal: error message of a transformer with both techniques; None if it can be built.
    """

    names: tuple[str, str]
    refusal: str | None


def pairs(causal: bool) -> Iterator[Pair]:
    """Yield all pairs of techniques, including None for optional axes."""
    for axes in combinations(TECHNIQUES, 2):
        for two in product(*(_choices(axis) for axis in axes)):
            choices = dict(zip(axes, two, strict=True))
            first, second = (f"{axis} {_name(technique)}" for axis, technique in choices.items())
            yield Pair((first, second), _refusal(causal, choices))


def show_pairs() -> None:
    """Print the pairs that causal transformers do not support, and the numbers of supported pairs."""
    refused = [pair for pair in pairs(causal=True) if pair.refusal]
    table = Table("technique", "is incompatible with", "because", expand=True)
    for pair in refused:
        table.add_row(*pair.names, pair.refusal)
    print_out(table)
    for causal in (True, False):
        valid = [pair.refusal is None for pair in pairs(causal)]
        print_out(
            f"{causal=}: {sum(valid)} pairs of techniques are compatible, {len(valid) - sum(valid)} are not"
        )


def _choices(axis: str) -> list[Any]:
    return [*([None] if axis in OPTIONAL else []), *(technique() for technique in TECHNIQUES[axis].values())]


def _name(technique: Any) -> str:
    return NONE if technique is None else type(technique).__name__


def _refusal(causal: bool, choices: dict[str, Any]) -> str | None:
    try:
        TransformerSpec(causal=causal, **choices)
    except ValueError as error:
        return str(error)
    return None


LAYERS, HEADS = 2, 4
"""Numbers of layers and heads that are searched for different masks."""


def read_pattern(text: str) -> Pattern:
    """Return the pattern with this name, or described by this JSON object.

    Raises:
        ValueError: if the pattern or one of its options does not exist.
    """
    if text.lower() == FIT_MEMORY:
        raise ValueError(f"the {FIT_MEMORY} pattern depends on the memory; draw window or full instead")
    return parse_technique("pattern", text)


def distinct_masks(pattern: Pattern) -> dict[Pattern, str]:
    """Return the distinct patterns of layers and heads, each with the first layer and head that uses it."""
    places: dict[Pattern, str] = {}
    for layer in range(LAYERS):
        for head, rule in enumerate(pattern.for_layer(layer).for_heads(HEADS)):
            places.setdefault(rule, f"layer {layer}, head {head}")
    return places


def mask_image(rule: Pattern, length: int) -> np.ndarray:
    """Return the attention mask as (length, length): 0 masked, 1 visible if not causal, 2 always visible."""
    position = torch.arange(length)
    allowed = rule.mask_mod(position[:, None], position).expand(length, length).int()
    return (allowed * (1 + torch.ones(length, length).tril().int())).numpy()


def draw_pattern(pattern: Pattern, length: int, file: Path) -> None:
    """Write the mask as a PNG: rows are queries, columns are keys; future keys have a lighter color."""
    rules = distinct_masks(pattern)
    figure = Figure(figsize=(4 * len(rules), 4.4), layout="constrained")
    for number, (rule, place) in enumerate(rules.items(), start=1):
        axes = figure.add_subplot(1, len(rules), number)
        axes.imshow(mask_image(rule, length), cmap="Blues", vmin=0, vmax=2, interpolation="nearest")
        axes.set(title=place if len(rules) > 1 else "", xlabel="key", ylabel="query")
    figure.suptitle(repr(pattern))
    figure.savefig(file, format="png")
