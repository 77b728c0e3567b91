"""Reversible layers: gradients without what was computed, the same numbers as with it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rlxf.attention import (
    ACT,
    XL,
    AdaptiveSpan,
    DynamicSpan,
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
    y = _Through.apply(x, sublayers, *(module.w for module in modules.values()))
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


def kept(layers: int, residual: Reversible | None) -> int:
    """Bytes that a forward keeps for its gradient, weights aside."""
    spec = replace(SPEC, layers=layers, **({} if residual is None else {"residual": residual}))
    spec = spec if residual else replace(spec, residual=TransformerSpec().residual)
    model, run = fresh(spec), world(spec, random_index(2, 64), torch.float32)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y, _ = model(run.x, run.index)
    assert y.requires_grad
    return sum(found.values())


def test_more_layers_keep_no_more():
    assert kept(16, Reversible()) == kept(2, Reversible())
    assert kept(16, None) > 5 * kept(2, None)


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
