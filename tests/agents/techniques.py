"""A core option for each registered technique."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlxf.attention import Full, RoPE, Window
from rlxf.attention.kernels.base import Kernel, PairwiseKernel
from rlxf.attention.registry import TECHNIQUES
from tests.attention.specs import GATED_RFA, OF_ATTENTION, SHORT

Options = dict[str, Any]
"""Fields of a core by name."""


def of_no_pair(technique: Any) -> bool:
    """Return whether the technique is a kernel without support for pairwise positional encodings."""
    return isinstance(technique, Kernel) and not isinstance(technique, PairwiseKernel)


CHOICES = {
    f"{axis} {name}": {axis: chosen} | ({"position": RoPE()} if of_no_pair(chosen) else {})
    for axis, techniques in TECHNIQUES.items()
    for name, technique in techniques.items()
    for chosen in [SHORT.get(name) or technique()]
}
for name in ("Compressive", "StreamingXL", "RMT", "RATE"):
    CHOICES[f"memory {name}"]["pattern"] = Full()
CHOICES["memory KNN"]["pattern"] = Window(SHORT["KNN"].length + 1)
CHOICES["kernel RFA with a gate"] = {"kernel": GATED_RFA, "position": RoPE()}
each = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
"""Decorator that runs a test with each option: ``{axis: technique}``."""


DEPEND_ON_VALUES = {
    "keeps statistics": ["kernel Routing"],
    "the branches of the memory": [
        f"memory {name}" for name in ("StreamingXL", "Compressive", "KNN", "RMT", "RATE")
    ],
    "the branches of the pattern": [
        f"pattern {name}"
        for name in (
            *("AttentionSinks", "Dilated", "Local1D", "Local2D", "Strided", "FixedColumns", "Blockwise"),
            *("ETC", "Longformer", "BigBird", "BigBirdETC"),
        )
    ],
}
"""Part of a reason -> options for whose updates neither a compiled nor a captured program is made."""


def merged_choices(names: Iterable[str], make_core: Callable[[Options], Any]) -> dict[str, Options]:
    """Merge options of different axes, so that a few cores have all techniques of ``names``.

    Each option joins the first others with which it is compatible. The result has the options of each core by
    their names, e.g. "kernel RFA, memory XL".

    Args:
        names: keys of `CHOICES`.
        make_core: function that raises ValueError for options that are not compatible with each other.
    """
    merged: dict[str, Options] = {}
    for name in sorted(names, key=lambda name: -len(CHOICES[name])):
        choice = CHOICES[name]
        others = next((key for key in merged if are_compatible(merged[key], choice, make_core)), None)
        merged[name if others is None else f"{others}, {name}"] = choice | merged.pop(others, {})
    return merged


def are_compatible(first: Options, second: Options, make_core: Callable[[Options], Any]) -> bool:
    """Return whether two sets of options have no field in common, and all have an effect in one core."""
    both = first | second
    if len(both) < len(first) + len(second):
        return False
    if "recurrence" in both and not both.keys().isdisjoint(OF_ATTENTION):
        return False
    try:
        make_core(both)
    except ValueError:
        return False
    return True


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the weights by name."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def all_have_moved(before: dict[str, Tensor], module: nn.Module) -> None:
    """Fail unless each weight is finite and has changed."""
    for name, after in weights(module).items():
        assert torch.isfinite(after).all(), name
        assert not torch.equal(before[name], after), name
