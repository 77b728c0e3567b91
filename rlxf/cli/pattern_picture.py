"""Plots of sparse attention patterns."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from rlxf.attention.patterns.base import Pattern
from rlxf.cli.technique_names import FITTING, read

LAYERS, HEADS = 2, 4
"""Numbers of layers and heads that are searched for different masks."""


def read_pattern(text: str) -> Pattern:
    """Return the pattern with this name, or described by this JSON object.

    Raises:
        ValueError: if the pattern or one of its options does not exist.
    """
    if text.lower() == FITTING:
        raise ValueError(f"the {FITTING} pattern depends on the memory; draw window or full instead")
    return read("pattern", text)


def panels(pattern: Pattern) -> dict[Pattern, str]:
    """Return the distinct patterns of layers and heads, each with the first layer and head that uses it."""
    places: dict[Pattern, str] = {}
    for layer in range(LAYERS):
        for head, rule in enumerate(pattern.for_layer(layer).for_heads(HEADS)):
            places.setdefault(rule, f"layer {layer}, head {head}")
    return places


def seen(rule: Pattern, length: int) -> np.ndarray:
    """Return the attention mask as (length, length): 0 masked, 1 visible if not causal, 2 always visible."""
    position = torch.arange(length)
    allowed = rule.allows(position[:, None], position).expand(length, length).int()
    return (allowed * (1 + torch.ones(length, length).tril().int())).numpy()


def draw_pattern(pattern: Pattern, length: int, file: Path) -> None:
    """Write the mask as a PNG: rows are queries, columns are keys; future keys have a lighter color."""
    rules = panels(pattern)
    figure = Figure(figsize=(4 * len(rules), 4.4), layout="constrained")
    for number, (rule, place) in enumerate(rules.items(), start=1):
        axes = figure.add_subplot(1, len(rules), number)
        axes.imshow(seen(rule, length), cmap="Blues", vmin=0, vmax=2, interpolation="nearest")
        axes.set(title=place if len(rules) > 1 else "", xlabel="key", ylabel="query")
    figure.suptitle(repr(pattern))
    figure.savefig(file, format="png")
