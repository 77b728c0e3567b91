"""The fused acting step gives the bits of the general one, with the current weights, or is not used."""

from copy import deepcopy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from rlxf.agents.gtrxl.core import gtrxl
from rlxf.attention import (
    ACT,
    KNN,
    AdaptiveSpan,
    Add,
    AddReLU,
    Differential,
    Full,
    GRUGate,
    HighwayGate,
    InputGate,
    KVCache,
    Longformer,
    OutputGate,
    Reversible,
    RoPE,
    SigTanhGate,
    SinkSoftmax,
    Softmax,
    StreamingXL,
    Transformer,
    TransformerSpec,
    Universal,
    Window,
)
from rlxf.attention import transformer as transformer_module
from rlxf.attention.fused_step import FusedStep, NoFusedStep, build_fused_step
from rlxf.attention.linear import matmul_dtype
from rlxf.attention.registry import TECHNIQUES
from tests.attention.passes import BackwardsMixin, act
from tests.attention.specs import new_model
from tests.attention.worlds import ANYWHERE, numbers, random_index, random_segment

CORE = replace(gtrxl(4, width=8, heads=2), feed_forward=12)
RESIDUALS = [Add(), AddReLU(), GRUGate(), InputGate(), OutputGate(), HighwayGate(), SigTanhGate()]


@dataclass(frozen=True)
class Backwards(BackwardsMixin, GRUGate):
    """`GRUGate` that runs the layers in reverse order."""


@dataclass(frozen=True)
class EvenDistances(Full):
    """`Full` without keys at odd distances."""

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j) % 2 == 0


FUSED = {
    **{type(residual).__name__: replace(CORE, residual=residual) for residual in RESIDUALS},
    "post-norm, RMSNorm": replace(CORE, norm="post", norm_type="rms_norm", final_norm=False),
    "SwiGLU, chunks": replace(CORE, activation="swiglu", feed_forward_chunk=1),
    "GELU, dropout": replace(CORE, activation="gelu", dropout=0.2),
    "all keys": replace(CORE, pattern=Full()),
    "shorter window": replace(CORE, pattern=Window(3)),
    "universal": replace(CORE, layers=3, depth=Universal()),
}
GENERAL = {
    "rotation": replace(CORE, position=RoPE()),
    "no position": replace(CORE, position=None),
    "spans": replace(CORE, kernel=AdaptiveSpan(limit=4, ramp=3)),
    "learned sink": replace(CORE, kernel=SinkSoftmax()),
    "softmax1": replace(CORE, kernel=Softmax(softmax1=True)),
    "differential": replace(CORE, kernel=Differential()),
    "key heads": replace(CORE, kv_heads=1),
    "gated attention": replace(CORE, attention_gate="headwise"),
    "normalized keys": replace(CORE, qk_norm="rms"),
    "windows by layer": replace(CORE, pattern=Window((3, 5))),
    "global tokens": replace(CORE, pattern=Longformer(2, global_tokens=1)),
    "reversible": replace(CORE, residual=Reversible()),
    "adaptive depth": replace(CORE, depth=ACT()),
    "cross-attention": replace(CORE, cross_attention=True),
}
OTHER_CACHES = {
    "sinks": replace(CORE, pattern=Full(), memory=StreamingXL(2, 2)),
    "KNN": replace(CORE, memory=KNN(4, 6, 3)),
}


def acts_alone(model: Transformer) -> tuple[Tensor, Tensor]:
    """Return outputs and inputs of layers over episodes with empty slots, some inside of them."""
    run = random_segment(model.spec, random_index(5, 30, moves=ANYWHERE), torch.float32)
    cache = model.cache(model.initial_state(5), model.memory.length + 1, run.context)
    return act(model, run, cache)


def general(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """Return `acts_alone` of a copy of the model without a fused step."""
    with monkeypatch.context() as patch:
        patch.setattr(transformer_module, "build_fused_step", lambda _: NoFusedStep())
        return acts_alone(deepcopy(model))


def assert_same_bits(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    for fused, expected in zip(acts_alone(model), general(model, monkeypatch), strict=True):
        assert torch.equal(fused, expected)


def is_fused(model: Transformer) -> bool:
    return isinstance(build_fused_step(model), FusedStep)


def model_of(spec: TransformerSpec) -> Transformer:
    return new_model(spec).eval()


@pytest.mark.parametrize("spec", FUSED.values(), ids=FUSED)
def test_fused_and_general_steps_are_equal_bit_for_bit(spec, monkeypatch):
    model = model_of(spec)
    assert is_fused(model)
    assert_same_bits(model, monkeypatch)


@pytest.mark.parametrize("spec", GENERAL.values(), ids=GENERAL)
def test_techniques_without_a_fused_form_use_the_general_step(spec):
    assert not is_fused(model_of(spec))


def test_a_technique_that_changes_the_passes_uses_the_general_step(monkeypatch):
    monkeypatch.setitem(TECHNIQUES, "residual", TECHNIQUES["residual"] | {"Backwards": Backwards})
    assert not is_fused(model_of(replace(CORE, residual=Backwards())))


def test_a_pattern_with_an_overridden_rule_uses_the_general_step(monkeypatch):
    monkeypatch.setitem(TECHNIQUES, "pattern", TECHNIQUES["pattern"] | {"EvenDistances": EvenDistances})
    assert not is_fused(model_of(replace(CORE, pattern=EvenDistances())))


@pytest.mark.parametrize("spec", OTHER_CACHES.values(), ids=OTHER_CACHES)
def test_caches_with_other_state_use_the_general_step(spec, monkeypatch):
    assert_same_bits(model_of(spec), monkeypatch)


def test_early_steps_return_the_output_of_the_step():
    model, cache = model_of(CORE), model_of(CORE).cache(model_of(CORE).initial_state(5), 5)
    run = random_segment(CORE, random_index(5, 1), torch.float32)
    y, _ = model.step(run.x[:, 0], run.index, cache.copy())
    assert torch.equal(model.early_step(run.x[:, 0], run.index, cache), y)


def add_in_place(model: Transformer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)


def add_to_data(model: Transformer) -> None:
    for parameter in model.parameters():
        parameter.data.add_(0.1)


def take_optimizer_step(model: Transformer) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    x = numbers(1, 3, 8, dtype=torch.float32)
    model.outputs(x, random_index(1, 3)).square().sum().backward()
    optimizer.step()


def load_weights(model: Transformer) -> None:
    model.load_state_dict(new_model(CORE, seed=1).state_dict())


def assign_weights(model: Transformer) -> None:
    model.load_state_dict(new_model(CORE, seed=1).state_dict(), assign=True)


def replace_parameter(model: Transformer) -> None:
    gate = model.blocks[1].feed_forward_norm.residual
    gate.b = nn.Parameter(gate.b.detach() + 1)


def replace_module(model: Transformer) -> None:
    attention = model.blocks[0].attention
    attention.out = nn.Sequential(attention.out, nn.Tanh())


def add_hook(model: Transformer) -> None:
    model.blocks[0].feed_forward.register_forward_hook(lambda module, inputs, output: 2 * output)


def assign_forward(model: Transformer) -> None:
    out = model.blocks[0].attention.out
    former = out.forward
    out.forward = lambda x: 2 * former(x)


def parametrize_weights(model: Transformer) -> None:
    block = model.blocks[0]
    for linear in (block.attention.qkv, block.attention.out, block.feed_forward.inner):
        nn.utils.parametrizations.weight_norm(linear)
    acts_alone(model)
    add_in_place(model)


def change_dtype(model: Transformer) -> None:
    model.to(torch.bfloat16).to(torch.float32)


CHANGES = (
    add_in_place,
    add_to_data,
    take_optimizer_step,
    load_weights,
    assign_weights,
    replace_parameter,
    replace_module,
    add_hook,
    assign_forward,
    parametrize_weights,
    change_dtype,
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_weights_takes_effect_in_the_next_step(change, monkeypatch):
    model = model_of(CORE)
    before, _ = acts_alone(model)
    change(model)
    after, _ = acts_alone(model)
    assert not torch.equal(after, before)
    assert torch.equal(after, general(model, monkeypatch)[0])


def test_a_copy_acts_with_its_own_weights(monkeypatch):
    model = model_of(CORE)
    before, _ = acts_alone(model)
    copy = deepcopy(model)
    add_in_place(copy)
    assert_same_bits(copy, monkeypatch)
    assert torch.equal(acts_alone(model)[0], before)


def test_dropout_is_active_in_training_mode():
    model = new_model(replace(CORE, dropout=0.5)).train()
    assert not torch.equal(acts_alone(model)[0], acts_alone(model)[0])


def test_steps_compute_products_in_another_dtype(monkeypatch):
    model = model_of(CORE)
    before, _ = acts_alone(model)
    with matmul_dtype(torch.bfloat16):
        assert not torch.equal(acts_alone(model)[0], before)
        assert_same_bits(model, monkeypatch)
    assert torch.equal(acts_alone(model)[0], before)


def test_steps_under_autocast_use_the_general_step(monkeypatch):
    model = model_of(CORE)
    before, _ = acts_alone(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(acts_alone(model)[0], before)
        assert_same_bits(model, monkeypatch)


@pytest.mark.parametrize(
    "register", [register_module_forward_hook, register_module_forward_pre_hook], ids=["hook", "pre-hook"]
)
def test_global_hooks_are_called(register):
    model, called = model_of(CORE), set()
    acts_alone(model)
    with register(lambda module, *_: called.add(module)):
        acts_alone(model)
    assert {block.feed_forward for block in model.blocks} < called


def test_a_cache_of_a_subclass_is_not_fused():
    class Counting(KVCache):
        def observe_input(self, pass_index, x):
            self.seen = getattr(self, "seen", 0) + 1

    model = model_of(CORE)
    cache = Counting(**vars(model.cache(model.initial_state(1), 5)))
    run = random_segment(CORE, random_index(1, 1), torch.float32)
    model.step(run.x[:, 0], run.index, cache)
    assert cache.seen == CORE.layers
