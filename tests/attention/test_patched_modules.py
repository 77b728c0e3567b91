"""Hooks, assigned ``forward`` methods and replaced norms have the same effect in segments and in steps."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rlxf.agents.gtrxl.core import gtrxl
from rlxf.attention import LSH, XL, Longformer, Transformer, TransformerSpec
from rlxf.attention.linear import Linear, is_patched, is_plain
from tests.attention.passes import act, assert_close_for_dtype, learn
from tests.attention.specs import new_model
from tests.attention.worlds import random_index, random_segment

MEMORY = 4
CORE = replace(gtrxl(MEMORY, width=8, heads=2), feed_forward=12)
SPECS = {
    "XL": CORE,
    "post-norm": replace(CORE, norm="post"),
    "RMSNorm": replace(CORE, norm_type="rms_norm"),
    "grouped queries": replace(CORE, kv_heads=1, qk_norm="rms"),
    "global tokens": replace(CORE, pattern=Longformer(4, global_tokens=1), memory=XL(12)),
    "shared queries and keys": replace(CORE, kernel=LSH(rounds=2, buckets=4), position=None),
}


def projections(model: Transformer) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("qkv")]


def norms(model: Transformer) -> list[nn.Module]:
    return [block.attention_norm.norm for block in model.blocks]


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, inputs, y: 2 * y + 1)


def hook_before(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, inputs: (inputs[0].sin(),))


def assign_forward(module: nn.Module) -> None:
    former = module.forward
    module.forward = lambda x: 2 * former(x) + 1


PATCHES = {
    f"{patch.__name__} {modules.__name__}": (patch, modules)
    for patch in (hook, hook_before, assign_forward)
    for modules in (projections, norms)
}


def outputs(model: Transformer) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of segments, those of steps, and that of the last token alone."""
    world = random_segment(model.spec, random_index(3, 12), torch.float32)
    with torch.no_grad():
        learned, _ = learn(model, world, [5, 7])
        last = model.outputs(world.x, world.index, output_slice=slice(-1, None))
        capacity = model.memory.length + 1
        return learned, act(model, world, model.cache(model.initial_state(3), capacity))[0], last


def model_of(spec: TransformerSpec) -> Transformer:
    return new_model(spec).eval()


@pytest.mark.parametrize(("patch", "modules"), PATCHES.values(), ids=PATCHES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_patched_modules_act_as_they_learn(spec, patch, modules):
    model = model_of(spec)
    before, *_ = outputs(model)
    for module in modules(model):
        patch(module)
    learned, acted, last = outputs(model)
    assert not torch.allclose(learned, before, atol=1e-2)
    assert_close_for_dtype(acted, learned)
    world = random_segment(model.spec, random_index(3, 12), torch.float32)
    with torch.no_grad():
        assert_close_for_dtype(last, model.outputs(world.x, world.index)[:, -1:])


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.Identity(), nn.Sequential(nn.LayerNorm(8), nn.Tanh())])
def test_another_norm_acts_as_it_learns(norm):
    model = model_of(CORE)
    before, *_ = outputs(model)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.5)
    for block in model.blocks:
        block.attention_norm.norm = norm
    learned, acted, _ = outputs(model)
    assert not torch.allclose(learned, before, atol=1e-2)
    assert_close_for_dtype(acted, learned)


def test_hooks_of_the_backward_pass_are_called_for_each_linear_layer():
    model, called = model_of(CORE), set()
    linears = [module for module in model.modules() if isinstance(module, Linear) and module.bias is not None]
    for module in linears:
        module.register_full_backward_hook(lambda module, *_: called.add(module))
    world = random_segment(CORE, random_index(2, 4), torch.float32)
    model.outputs(world.x.requires_grad_(), world.index).sum().backward()
    assert called == set(linears)


@pytest.mark.parametrize(
    "patch",
    [
        hook,
        hook_before,
        assign_forward,
        lambda module: module.register_full_backward_hook(lambda *_: None),
        lambda module: module.register_full_backward_pre_hook(lambda *_: None),
    ],
)
def test_a_patched_layer_is_not_plain(patch):
    layer = Linear(3, 2)
    assert is_plain(layer)
    assert not is_patched(layer)
    patch(layer)
    assert not is_plain(layer)
    assert is_patched(layer)


def test_layers_are_not_plain_during_hooks_for_all_modules():
    layer = Linear(3, 2)
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert not is_plain(layer)
    assert is_plain(layer)
