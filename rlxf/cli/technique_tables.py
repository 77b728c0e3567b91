"""Tables of techniques and of their combinations, and images of attention patterns."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from rlxf.agents.contexts import CONTEXT_MERGERS
from rlxf.attention import XL, TransformerSpec
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.registry import HEADS, OPTIONAL, TECHNIQUES
from rlxf.cli.output import print_out
from rlxf.cli.spec_options import FIT_MEMORY, NONE, QUESTIONS, parse_technique, summary

HEAD_QUESTION = "how does a trained agent use logged trajectories?"
"""Question of output heads with a datastore, which are not part of the transformer."""
CONTEXT_QUESTION = "how does a trained agent combine several contexts?"
"""Question of techniques that merge action distributions, which are not part of the transformer."""


def show_techniques() -> None:
    """Print a table for each axis, and for output heads and combinations of contexts."""
    for axis, question in QUESTIONS.items():
        _show_table(f"{axis}: {question}", TECHNIQUES[axis], partial(properties, axis))
    _show_table(f"head: {HEAD_QUESTION}", HEADS, costs)
    _show_table(f"context: {CONTEXT_QUESTION}", CONTEXT_MERGERS, costs)


def _show_table(
    title: str, techniques: Mapping[str, type[Any]], describe: Callable[[type[Any]], str]
) -> None:
    table = Table("technique", "description", title=title, expand=True)
    for technique in techniques.values():
        lines = (summary(technique), describe(technique), technique.paper)
        table.add_row(Text(repr(technique())), Text("\n".join(lines)))
    print_out(table)


def properties(axis: str, technique: type[Any]) -> str:
    """Return origin of the causal form, cost for L tokens, and support of memory as text."""
    return f"{costs(technique)}; with memory: {with_memory(axis, technique())}"


def costs(technique: type[Any]) -> str:
    """Return the origin of the causal form and the cost of a technique as text."""
    return f"causal form: {technique.causal}; cost: {technique.cost}"


def with_memory(axis: str, technique: Any) -> str:
    """Return "yes" if a transformer with this technique and an XL memory can be built, else "no"."""
    try:
        TransformerSpec(**{"memory": XL(), axis: technique}).build()
    except ValueError:
        return "no"
    return "yes"


@dataclass(frozen=True)
class Pair:
    """Two techniques of different axes, with their default options.

    Args:
        names: axis and name of both techniques.
        error: error message of a transformer with both techniques; None if it can be built.
    """

    names: tuple[str, str]
    error: str | None


def pairs(causal: bool) -> Iterator[Pair]:
    """Yield all pairs of techniques, including None for optional axes."""
    for axes in combinations(TECHNIQUES, 2):
        for two in product(*(_choices(axis) for axis in axes)):
            choices = dict(zip(axes, two, strict=True))
            first, second = (f"{axis} {_name(technique)}" for axis, technique in choices.items())
            yield Pair((first, second), _error(causal, choices))


def show_pairs() -> None:
    """Print the pairs that causal transformers do not support, and the numbers of supported pairs."""
    refused = [pair for pair in pairs(causal=True) if pair.error]
    table = Table("technique", "is incompatible with", "because", expand=True)
    for pair in refused:
        table.add_row(*pair.names, pair.error)
    print_out(table)
    for causal in (True, False):
        valid = [pair.error is None for pair in pairs(causal)]
        print_out(
            f"{causal=}: {sum(valid)} pairs of techniques are compatible, {len(valid) - sum(valid)} are not"
        )


def _choices(axis: str) -> list[Any]:
    return [*([None] if axis in OPTIONAL else []), *(technique() for technique in TECHNIQUES[axis].values())]


def _name(technique: Any) -> str:
    return NONE if technique is None else type(technique).__name__


def _error(causal: bool, choices: dict[str, Any]) -> str | None:
    try:
        TransformerSpec(causal=causal, **choices)
    except ValueError as error:
        return str(error)
    return None


DRAWN_LAYERS, DRAWN_HEADS = 2, 4
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
    for layer in range(DRAWN_LAYERS):
        for head, rule in enumerate(pattern.for_layer(layer).for_heads(DRAWN_HEADS)):
            places.setdefault(rule, f"layer {layer}, head {head}")
    return places


def mask_image(rule: Pattern, length: int) -> np.ndarray:
    """Return the attention mask as (length, length): 0 masked, 1 visible if not causal, 2 always visible."""
    position = torch.arange(length)
    allowed = rule.mask_mod(position[:, None], position).expand(length, length).int()
    return (allowed * (1 + torch.ones(length, length).tril().int())).numpy()


def draw_pattern(pattern: Pattern, length: int, file: Path) -> None:
    """Write the mask as a PNG, and print its path.

    Rows are queries, columns are keys; future keys have a lighter color.
    """
    rules = distinct_masks(pattern)
    figure = Figure(figsize=(4 * len(rules), 4.4), layout="constrained")
    for number, (rule, place) in enumerate(rules.items(), start=1):
        axes = figure.add_subplot(1, len(rules), number)
        axes.imshow(mask_image(rule, length), cmap="Blues", vmin=0, vmax=2, interpolation="nearest")
        axes.set(title=place if len(rules) > 1 else "", xlabel="key", ylabel="query")
    figure.suptitle(repr(pattern))
    figure.savefig(file, format="png")
    print_out(f"{file}: rows are queries, columns are keys; light: masked in causal transformers")
