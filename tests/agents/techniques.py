"""One choice for each technique that there is; later ones join by being listed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlxf.attention import Full, RoPE, Window
from rlxf.attention.kernels.base import Kernel, PairwiseKernel
from rlxf.attention.techniques import TECHNIQUES
from tests.attention.specs import FORGETFUL, SHORT


def of_no_pair(technique: Any) -> bool:
    """Whether it is a kernel that takes no position which scores pairs, as agents have by default."""
    return isinstance(technique, Kernel) and not isinstance(technique, PairwiseKernel)


CHOICES = {
    f"{axis} {name}": {axis: chosen} | ({"position": RoPE()} if of_no_pair(chosen) else {})
    for axis, techniques in TECHNIQUES.items()
    for name, technique in techniques.items()
    for chosen in [SHORT.get(name) or technique()]
}
CHOICES["memory Compressive"]["pattern"] = Full()
CHOICES["memory KNN"]["pattern"] = Window(SHORT["KNN"].length + 1)
CHOICES["kernel RFA that forgets"] = {"kernel": FORGETFUL, "position": RoPE()}
each = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
"""Run a test with each of them: ``{axis: technique}``."""


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the weights by name."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def all_have_moved(before: dict[str, Tensor], module: nn.Module) -> None:
    """Fail unless each weight is finite and another than before."""
    for name, after in weights(module).items():
        assert torch.isfinite(after).all(), name
        assert not torch.equal(before[name], after), name
