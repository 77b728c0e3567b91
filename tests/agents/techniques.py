"""One choice for each technique that there is; later ones join by being listed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlxf.attention.techniques import TECHNIQUES
from tests.attention.specs import SHORT

CHOICES = {
    f"{axis} {name}": {axis: SHORT.get(name) or technique()}
    for axis, techniques in TECHNIQUES.items()
    for name, technique in techniques.items()
}
each = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
"""Run a test with each of them: ``{axis: technique}``."""


def named(choice: dict[str, Any], sentence: str) -> bool:
    """Whether a sentence says which technique does not fit."""
    return any(repr(technique) in sentence for technique in choice.values())


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the weights by name."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def all_have_moved(before: dict[str, Tensor], module: nn.Module) -> None:
    """Fail unless each weight is finite and another than before."""
    for name, after in weights(module).items():
        assert torch.isfinite(after).all(), name
        assert not torch.equal(before[name], after), name
