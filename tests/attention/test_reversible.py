"""Reversible layers: gradients without what was computed, the same numbers as with it."""

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
    Index,
    Reversible,
    Routing,
    T5Bias,
    Transformer,
    TransformerSpec,
    Tupe,
    Universal,
    UniversalSinusoid,
    Window,
    XLRelative,
)
from rlxf.attention.passes import SegmentPasses
from rlxf.attention.reversible_passes import Sublayer, _Through
from tests.attention.oracle import close, load
from tests.attention.passes import agree, learn
from tests.attention.specs import fresh
from tests.attention.worlds import numbers, random_index, world

SPEC = TransformerSpec(width=8, heads=2, layers=4, feed_forward=12, residual=Reversible())
SPECS = {
    "plain": SPEC,
    "one layer": replace(SPEC, layers=1),
    "bias of all layers": replace(SPEC, position=T5Bias(buckets=4, max_distance=5)),
    "bias of all layers, gathered": replace(SPEC, position=Tupe(600), pattern=Window(5)),
    "distances and memory": replace(SPEC, position=XLRelative(), pattern=Window(5), memory=XL(4)),
    "one layer again and again": replace(SPEC, depth=Universal(), position=UniversalSinusoid()),
    "what ACT halts": replace(SPEC, depth=ACT(bias=-1.0), position=UniversalSinusoid()),
    "spans": replace(SPEC, kernel=AdaptiveSpan(limit=4, ramp=3)),
    "dropout": replace(SPEC, dropout=0.3),
    "encoder": replace(SPEC, causal=False),
}
each = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


class Mixed(nn.Module):
    """The sublayers of the vector: ``tanh(x @ w + mean over time)``."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.w = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w + x.mean(dim=1, keepdim=True)).tanh()


def test_the_package_reformer_pytorch():
    vector = load("reversible")
    modules = {name: Mixed(vector[f"w_{name}"]) for name in ("F1", "G1", "F2", "G2")}
    sublayers = [Sublayer(n % 2, module, [module.w]) for n, module in enumerate(modules.values())]
    first, second = (vector[f"in_x{n}"].requires_grad_() for n in (1, 2))
    x = torch.cat([first, second], dim=-1)
    y = _Through.apply(x, sublayers, [], *(module.w for module in modules.values()))
    close(y, vector["out"], 1e-12)
    y.square().sum().backward()
    close(first.grad, vector["out_grad_x1"], 1e-12)
    close(second.grad, vector["out_grad_x2"], 1e-12)
    for name, module in modules.items():
        close(module.w.grad, vector[f"out_grad_{name}"], 1e-12)


def learned(model: Transformer, length: int) -> tuple[Tensor, ...]:
    """Outputs, states, penalty and gradients of two segments, with the same random numbers each time."""
    torch.manual_seed(3)
    model.train()
    model.zero_grad()
    run = world(model.spec, random_index(2, 2 * length))
    x = run.x.clone().requires_grad_()
    y, state = learn(model, run.with_tokens(x), [length, length])
    y = torch.where(run.filled[..., None], y, 0.0)
    loss = (y * numbers(*y.shape, seed=8)).sum() + (model.penalty() or 0.0)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return y.detach(), x.grad, *([] if state is None else [state.hidden]), loss.detach(), *gradients


@each
@pytest.mark.parametrize("length", [6, 300])
def test_nothing_differs_from_keeping_all(spec, length, monkeypatch):
    model = fresh(spec).double()
    found = learned(model, length)
    monkeypatch.setattr(Transformer, "_passes", lambda self, **given: SegmentPasses(**given))
    for part, wanted in zip(found, learned(model, length), strict=True):
        agree(part, wanted)


BATCH, LENGTH, WIDTH = 2, 256, 64
TOKENS = BATCH * LENGTH * WIDTH * 4
WIDE = replace(SPEC, width=WIDTH, feed_forward=WIDTH)
STACKS = {
    "plain": WIDE,
    "memory": replace(WIDE, position=XLRelative(), pattern=Window(9), memory=XL(8)),
    "far memory": replace(WIDE, pattern=Window(9), memory=KNN(8, 16, 2, layer=1)),
    "signals": replace(WIDE, position=UniversalSinusoid()),
}
LOOKS: dict[str, Callable[..., Tensor]] = {
    "exits": lambda model, *given: model.exits(*given).outputs,
    "outputs": lambda model, *given: model.outputs(*given),
    "encode": lambda model, *given: model.encode(*given)[0],
    "forward": lambda model, *given: model(*given)[0],
}


def rooms(of: Any) -> dict[StorageWeakRef, int]:
    """Where the tensors among some objects lie, and in how many bytes; it keeps none of them."""
    held = [tensor.untyped_storage() for tensor in tree_leaves(of) if isinstance(tensor, Tensor)]
    return {StorageWeakRef(room): room.nbytes() for room in held}


class Made(TorchDispatchMode):
    """Notes what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, given = function(*args, **(kwargs or {})), rooms((args, kwargs))
        self.rooms |= {room: size for room, size in rooms(result).items() if room not in given}
        return result


def kept(spec: TransformerSpec, layers: int, look: Callable[..., Tensor]) -> int:
    """Bytes that outputs hold for their gradient, wherever; weights and what is given aside."""
    model = fresh(replace(spec, layers=layers))
    run = world(spec, Index.range(BATCH, LENGTH), torch.float32)
    given = run.x, run.index, model.initial_state(BATCH) if spec.memory else None
    look(model, *given)  # what is made once is there now
    with Made() as made:
        y = look(model, *given)
    assert y.requires_grad
    return sum(size for room, size in made.rooms.items() if not room.expired())


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("spec", STACKS.values(), ids=STACKS)
def test_more_layers_keep_no_more(spec, look):
    assert kept(spec, 8, look) == kept(spec, 2, look)


def test_more_layers_of_others_do():
    plain = replace(WIDE, residual=TransformerSpec().residual)
    assert kept(plain, 8, LOOKS["exits"]) - kept(plain, 2, LOOKS["exits"]) > 6 * TOKENS


@pytest.mark.parametrize("look", [LOOKS["exits"], LOOKS["outputs"]], ids=["exits", "outputs"])
@pytest.mark.parametrize("spec", STACKS.values(), ids=STACKS)
def test_no_layer_waits_for_the_last(spec, look):
    model, run, read = fresh(spec), world(spec, Index.range(BATCH, 16), torch.float32), []
    alive = []

    def note(norm: nn.Module, given: tuple[Tensor]) -> None:
        alive.append(sum(tokens() is not None for tokens in read))
        read.append(weakref.ref(given[0]))

    for block in model.blocks:
        block.join_attention.norm.register_forward_pre_hook(note)
    y = look(model, run.x, run.index, model.initial_state(BATCH) if spec.memory else None)
    assert y.requires_grad
    assert len(read) >= spec.layers
    assert max(alive) <= 1


@each
def test_what_entered_each_layer_is_told(spec):
    model, run = fresh(spec).double(), world(spec, random_index(2, 6))
    with torch.no_grad():
        wanted = model.eval().encode(run.x, run.index)[1]
    found = model.encode(run.x, run.index)[1]
    assert len(found) == len(wanted) == spec.layers
    for part, expected in zip(found, wanted, strict=True):
        agree(part, expected)


def test_clusters_learn_as_often_as_without():
    spec = replace(SPEC, kernel=Routing(clusters=2, commitment=0.0), layers=2)
    moved = []
    for residual in (Reversible(), TransformerSpec().residual):
        model = fresh(replace(spec, residual=residual)).train()
        run = world(spec, random_index(2, 8), torch.float32)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        y, _ = model(run.x, run.index)
        y.square().sum().backward()
        model.after_update()
        moved.append([not torch.equal(before[name], b) for name, b in model.named_buffers()])
    assert moved[0] == moved[1]
    assert any(moved[0])


@pytest.mark.parametrize(
    "choice",
    [{"norm": "post"}, {"cross_attention": True}, {"kernel": DynamicSpan()}, {"kernel": Routing()}],
    ids=str,
)
def test_what_cannot_be_computed_back_is_refused(choice):
    with pytest.raises(ValueError, match=r"Reversible\(\)"):
        replace(SPEC, **choice)
