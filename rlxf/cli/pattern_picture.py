"""The picture of a pattern: which key each query may see."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from rlxf.attention.patterns.base import Pattern
from rlxf.cli.technique_names import FITTING, read

LAYERS, HEADS = 2, 4
"""Of these, every rule is shown once."""


def read_pattern(text: str) -> Pattern:
    """The pattern of that name with its defaults, or the one that a JSON object describes.

    Raises:
        ValueError: if there is no such pattern or option.
    """
    if text.lower() == FITTING:
        raise ValueError(f"the {FITTING} pattern depends on the memory; draw window or full")
    return read("pattern", text)


def panels(pattern: Pattern) -> dict[Pattern, str]:
    """The different rules of the layers and heads, each with the first place where it holds."""
    found: dict[Pattern, str] = {}
    for layer in range(LAYERS):
        for head, rule in enumerate(pattern.for_layer(layer).for_heads(HEADS)):
            found.setdefault(rule, f"layer {layer}, head {head}")
    return found


def seen(rule: Pattern, length: int) -> np.ndarray:
    """(length, length): 0 where a query may not see a key, 1 where it may unless causal, 2 where it may."""
    position = torch.arange(length)
    allowed = rule.allows(position[:, None], position).expand(length, length).int()
    return (allowed * (1 + torch.ones(length, length).tril().int())).numpy()


def draw_pattern(pattern: Pattern, length: int, file: Path) -> None:
    """Write a PNG: queries from top to bottom, keys from left to right; what lies ahead is paler."""
    rules = panels(pattern)
    figure = Figure(figsize=(4 * len(rules), 4.4), layout="constrained")
    for number, (rule, place) in enumerate(rules.items(), start=1):
        axes = figure.add_subplot(1, len(rules), number)
        axes.imshow(seen(rule, length), cmap="Blues", vmin=0, vmax=2, interpolation="nearest")
        axes.set(title=place if len(rules) > 1 else "", xlabel="key", ylabel="query")
    figure.suptitle(repr(pattern))
    figure.savefig(file, format="png")
