"""Tests that transformers with each technique compute on an accelerator what they compute on the CPU."""

import pytest

from rlxf.attention.registry import HEADS
from tests.attention.specs import ALONE, RECIPES, each
from tests.devices.cores import check_acting, check_head, check_learning, check_sparse, waits

COMBINED = ("encoder, ETC, labels", "decoder", "Gated Transformer-XL")
SPECS = ALONE | {name: RECIPES[name] for name in COMBINED}
PATTERNS = {name: spec for name, spec in ALONE.items() if name.startswith("pattern")}


@each(SPECS)
def test_learning(spec, on_device):
    on_device(check_learning, spec)


@each({name: spec for name, spec in SPECS.items() if spec.causal})
def test_acting(spec, on_device):
    on_device(check_acting, spec)


@each(PATTERNS)
def test_block_sparse_execution(spec, on_device):
    on_device(check_sparse, spec)


@pytest.mark.parametrize("name", HEADS)
def test_output_heads(name, on_device):
    on_device(check_head, name)


@each({name: RECIPES[name] for name in ("Gated Transformer-XL", "RoPE, yarn, gates and memory")})
def test_the_program_does_not_wait(spec, on_device):
    assert on_device(waits, spec) == (0, 0.0)
