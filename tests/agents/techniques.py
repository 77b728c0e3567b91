"""A core option for each registered technique."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlxf.attention import Full, RoPE, Window
from rlxf.attention.kernels.base import Kernel, PairwiseKernel
from rlxf.attention.registry import TECHNIQUES
from tests.attention.specs import GATED_RFA, SHORT

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


def combinations(names: Iterable[str], make_core: Callable[[Options], Any]) -> dict[str, Options]:
    """Return options of several axes that together have all techniques of ``names``; fewer than one for each.

    Args:
        names: keys of `CHOICES`.
        make_core: function that raises ValueError for options that are not compatible with each other.
    """
    combined: dict[str, Options] = {}
    for name in sorted(names, key=lambda name: -len(CHOICES[name])):
        choice = CHOICES[name]
        other = next((key for key, found in combined.items() if fits(found, choice, make_core)), None)
        combined[name if other is None else f"{other}, {name}"] = choice | combined.pop(other, {})
    return combined


def fits(found: Options, choice: Options, make_core: Callable[[Options], Any]) -> bool:
    """Return whether the options are of different axes and make a core together."""
    if found.keys() & choice.keys():
        return False
    try:
        make_core(found | choice)
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
