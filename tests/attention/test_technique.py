"""Techniques change a transformer through their interfaces only, so that new ones can do so, too."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from rlxf.attention import (
    ETC,
    RFA,
    Add,
    Full,
    Longformer,
    OutputGate,
    Reversible,
    TokenIndex,
    TransformerSpec,
    Window,
)
from rlxf.attention.attention import Attention
from rlxf.attention.inspection import gate_activations
from rlxf.attention.kernels.base import RecurrentKernelState
from rlxf.attention.patterns.window import limit_distance
from rlxf.attention.positions.base import Position
from rlxf.attention.registry import TECHNIQUES, technique_from_json, technique_to_json
from rlxf.attention.technique import AttentionFactory
from tests.attention.passes import BackwardsMixin
from tests.attention.specs import new_model
from tests.attention.worlds import numbers

SPEC = TransformerSpec(width=8, heads=2, layers=2)


class NegatedAttention(Attention):
    """Attention whose output has the other sign."""

    def forward(self, *args):
        return -super().forward(*args)


@dataclass(frozen=True)
class Negated(Position):
    """Technique with an attention module of its own."""

    paper = "none"

    def attention_class(self, default: AttentionFactory) -> AttentionFactory:
        return NegatedAttention


@dataclass(frozen=True)
class Backwards(BackwardsMixin, Add):
    """`Add` that runs the layers in reverse order."""


@pytest.fixture
def registered(monkeypatch):
    """Add the techniques of this file to the registry."""
    for axis, technique in (("position", Negated), ("residual", Backwards)):
        monkeypatch.setitem(TECHNIQUES, axis, TECHNIQUES[axis] | {technique.__name__: technique})


def outputs(spec: TransformerSpec) -> Tensor:
    return new_model(spec).outputs(numbers(1, 5, 8, dtype=torch.float32), TokenIndex.range(1, 5))


@pytest.mark.usefixtures("registered")
def test_a_technique_can_replace_the_attention_module():
    model = new_model(replace(SPEC, position=Negated()))
    assert {type(block.attention) for block in model.blocks} == {NegatedAttention}
    assert not torch.equal(outputs(replace(SPEC, position=Negated())), outputs(SPEC))


@pytest.mark.usefixtures("registered")
def test_a_residual_can_run_the_passes():
    backwards, model = new_model(replace(SPEC, residual=Backwards())), new_model(SPEC)
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]
    x, index = numbers(1, 5, 8, dtype=torch.float32), TokenIndex.range(1, 5)
    assert torch.equal(backwards.outputs(x, index), model.outputs(x, index))


def test_a_recurrent_kernel_keeps_all_keys_of_a_pattern_that_hides_some():
    kinds = []
    for pattern in (Full(), Full() & Full(), Window(3), Full() | Window(3)):
        model = new_model(replace(SPEC, kernel=RFA(), pattern=pattern))
        cache = model.cache(model.initial_state(1), 5)
        kinds.append(all(isinstance(layer, RecurrentKernelState) for layer in cache.layers))
    assert kinds == [True, True, False, True]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (Full(), Window(4)),
        (Window(9), Window(4)),
        (Window(2), Window(2)),
        (ETC(8), ETC(8, farthest=3)),
        (Longformer(4, global_tokens=2), Longformer(4, global_tokens=2, farthest=3)),
        (Full() & Window(9), (Full() & Window(9)) & Window(4)),
    ],
    ids=str,
)
def test_patterns_limit_their_distance(pattern, expected):
    assert limit_distance(pattern, 3) == expected


def test_only_update_gates_are_recorded():
    x, index = numbers(1, 3, 8, dtype=torch.float32), TokenIndex.range(1, 3)
    for residual in (OutputGate(), Reversible()):
        assert gate_activations(new_model(replace(SPEC, residual=residual)), x, index) == {}


def test_nested_patterns_survive_json():
    pattern = (Full() & Window(9)) | Window(2)
    assert technique_from_json("pattern", technique_to_json(pattern)) == pattern
