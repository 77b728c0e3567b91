"""Tests of reversible layers: gradients without stored activations equal the usual ones."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlxf.attention import (
    ACT,
    KNN,
    XL,
    AdaptiveSpan,
    DynamicSpan,
    LearnedPerLayer,
    Reversible,
    Routing,
    T5Bias,
    TokenIndex,
    Transformer,
    TransformerSpec,
    Tupe,
    Universal,
    UniversalSinusoid,
    Window,
    XLRelative,
)
from rlxf.attention.residuals.base import Residual
from rlxf.attention.residuals.reversible import Sublayer, _ReversibleFunction
from tests.attention.oracle import close, load
from tests.attention.passes import assert_close_for_dtype, learn
from tests.attention.specs import new_model
from tests.attention.worlds import numbers, random_index, random_segment

SPEC = TransformerSpec(width=8, heads=2, layers=4, feed_forward=12, residual=Reversible())
SPECS = {
    "plain": SPEC,
    "one layer": replace(SPEC, layers=1),
    "bias of all layers": replace(SPEC, position=T5Bias(buckets=4, max_distance=5)),
    "bias of all layers, gathered": replace(SPEC, position=Tupe(600), pattern=Window(5)),
    "distances and memory": replace(SPEC, position=XLRelative(), pattern=Window(5), memory=XL(4)),
    "universal": replace(SPEC, depth=Universal(), position=UniversalSinusoid()),
    "ACT": replace(SPEC, depth=ACT(bias=-1.0), position=UniversalSinusoid()),
    "spans": replace(SPEC, kernel=AdaptiveSpan(limit=4, ramp=3)),
    "learned signals": replace(SPEC, position=LearnedPerLayer(600)),
    "dropout": replace(SPEC, dropout=0.3),
    "encoder": replace(SPEC, causal=False),
}
each = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


class MixingSublayer(nn.Module):
    """Sublayer of the reference vector: ``tanh(x @ w + mean over time)``."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.w = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w + x.mean(dim=1, keepdim=True)).tanh()


def test_equals_reformer_pytorch():
    vector = load("reversible")
    modules = {name: MixingSublayer(vector[f"w_{name}"]) for name in ("F1", "G1", "F2", "G2")}
    sublayers = [Sublayer(n % 2, module, [module.w]) for n, module in enumerate(modules.values())]
    first, second = (vector[f"in_x{n}"].requires_grad_() for n in (1, 2))
    x = torch.cat([first, second], dim=-1)
    y = _ReversibleFunction.apply(x, sublayers, [], *(module.w for module in modules.values()))
    close(y, vector["out"], 1e-12)
    y.square().sum().backward()
    close(first.grad, vector["out_grad_x1"], 1e-12)
    close(second.grad, vector["out_grad_x2"], 1e-12)
    for name, module in modules.items():
        close(module.w.grad, vector[f"out_grad_{name}"], 1e-12)


def train_segments(model: Transformer, length: int) -> tuple[Tensor, ...]:
    """Return outputs, states, loss and gradients of two segments, with fixed random numbers."""
    torch.manual_seed(3)
    model.train()
    model.zero_grad()
    run = random_segment(model.spec, random_index(2, 2 * length))
    x = run.x.clone().requires_grad_()
    y, state = learn(model, run.with_tokens(x), [length, length])
    y = torch.where(run.filled[..., None], y, 0.0)
    loss = (y * numbers(*y.shape, seed=8)).sum() + (model.penalty() or 0.0)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return y.detach(), x.grad, *([] if state is None else [state.hidden]), loss.detach(), *gradients


@each
@pytest.mark.parametrize("length", [6, 300])
def test_reversible_equals_stored_activations(spec, length, monkeypatch):
    model = new_model(spec).double()
    actual = train_segments(model, length)
    monkeypatch.setattr(Reversible, "run_passes", Residual.run_passes)
    for part, reference in zip(actual, train_segments(model, length), strict=True):
        assert_close_for_dtype(part, reference)


def test_backward_uses_the_autocast_of_forward(monkeypatch):
    """Gradients are those of stored activations, although backward is called outside of the context."""

    def gradients() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y, _ = model(x, TokenIndex.range(2, 8))
        (y * numbers(*y.shape, seed=8)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    model, x = new_model(SPEC), numbers(2, 8, SPEC.width).float()
    actual = gradients()
    monkeypatch.setattr(Reversible, "run_passes", Residual.run_passes)
    torch.testing.assert_close(actual, gradients(), rtol=1e-4, atol=1e-4)


BATCH, LENGTH, WIDTH = 2, 256, 64
STREAM_BYTES = BATCH * LENGTH * WIDTH * 4
WIDE = replace(SPEC, width=WIDTH, feed_forward=WIDTH)
STACKS = {
    "plain": WIDE,
    "memory": replace(WIDE, position=XLRelative(), pattern=Window(9), memory=XL(8)),
    "far memory": replace(WIDE, pattern=Window(9), memory=KNN(8, 16, 2, layer=1)),
    "signals": replace(WIDE, position=UniversalSinusoid()),
}
METHODS: dict[str, Callable[..., Tensor]] = {
    "exits": lambda model, *args: model.exits(*args).outputs,
    "outputs": lambda model, *args: model.outputs(*args),
    "encode": lambda model, *args: model.encode(*args)[0],
    "forward": lambda model, *args: model(*args)[0],
}


def storages(of: Any) -> dict[StorageWeakRef, int]:
    """Return weak references to the storages of the tensors in a tree, with their sizes in bytes."""
    held = [tensor.untyped_storage() for tensor in tree_leaves(of) if isinstance(tensor, Tensor)]
    return {StorageWeakRef(storage): storage.nbytes() for storage in held}


class AllocationRecorder(TorchDispatchMode):
    """Record the storages that operations allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, inputs = function(*args, **(kwargs or {})), storages((args, kwargs))
        new = {storage: size for storage, size in storages(result).items() if storage not in inputs}
        self.storages |= new
        return result


def stored_bytes(spec: TransformerSpec, layers: int, method: Callable[..., Tensor]) -> int:
    """Return the bytes that the graph of the outputs stores, without weights and inputs."""
    model = new_model(replace(spec, layers=layers))
    run = random_segment(spec, TokenIndex.range(BATCH, LENGTH), torch.float32)
    args = run.x, run.index, model.initial_state(BATCH) if spec.memory else None
    method(model, *args)  # fill the caches
    with AllocationRecorder() as recorder:
        y = method(model, *args)
    assert y.requires_grad
    return sum(size for storage, size in recorder.storages.items() if not storage.expired())


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("spec", STACKS.values(), ids=STACKS)
def test_stored_bytes_are_independent_of_depth(spec, method):
    assert stored_bytes(spec, 8, method) == stored_bytes(spec, 2, method)


def test_stored_bytes_grow_with_depth_without_reversible_layers():
    plain = replace(WIDE, residual=TransformerSpec().residual)
    assert (
        stored_bytes(plain, 8, METHODS["exits"]) - stored_bytes(plain, 2, METHODS["exits"]) > 6 * STREAM_BYTES
    )


@pytest.mark.parametrize("method", [METHODS["exits"], METHODS["outputs"]], ids=["exits", "outputs"])
@pytest.mark.parametrize("spec", STACKS.values(), ids=STACKS)
def test_layer_inputs_are_freed_immediately(spec, method):
    model, run, inputs = new_model(spec), random_segment(spec, TokenIndex.range(BATCH, 16), torch.float32), []
    alive = []

    def record(norm: nn.Module, args: tuple[Tensor]) -> None:
        alive.append(sum(tokens() is not None for tokens in inputs))
        inputs.append(weakref.ref(args[0]))

    for block in model.blocks:
        block.attention_norm.norm.register_forward_pre_hook(record)
    y = method(model, run.x, run.index, model.initial_state(BATCH) if spec.memory else None)
    assert y.requires_grad
    assert len(inputs) >= spec.layers
    assert max(alive) <= 1


@each
def test_layer_inputs_equal_those_without_gradient(spec):
    model, run = new_model(spec).double(), random_segment(spec, random_index(2, 6))
    with torch.no_grad():
        reference = model.eval().encode(run.x, run.index)[1]
    actual = model.encode(run.x, run.index)[1]
    assert len(actual) == len(reference) == spec.layers
    for part, expected in zip(actual, reference, strict=True):
        assert_close_for_dtype(part, expected)


def test_cluster_updates_equal_those_without_reversible_layers():
    spec = replace(SPEC, kernel=Routing(clusters=2, commitment=0.0), layers=2)
    changed = []
    for residual in (Reversible(), TransformerSpec().residual):
        model = new_model(replace(spec, residual=residual)).train()
        run = random_segment(spec, random_index(2, 8), torch.float32)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        y, _ = model(run.x, run.index)
        y.square().sum().backward()
        model.after_update()
        changed.append([not torch.equal(before[name], b) for name, b in model.named_buffers()])
    assert changed[0] == changed[1]
    assert any(changed[0])


@pytest.mark.parametrize(
    "choice",
    [{"norm": "post"}, {"cross_attention": True}, {"kernel": DynamicSpan()}, {"kernel": Routing()}],
    ids=str,
)
def test_incompatible_settings_raise(choice):
    with pytest.raises(ValueError, match=r"Reversible\(\)"):
        replace(SPEC, **choice)
