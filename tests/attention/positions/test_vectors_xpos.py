"""XPos reproduces the authors' code, with memory, at any position of an episode."""

from dataclasses import replace

import pytest
import torch

from rlxf.attention import Full, TokenIndex, TransformerSpec, Window, XPos
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.sparse import plan
from tests.attention.oracle import close, load
from tests.attention.passes import after_memory, over_heads
from tests.attention.specs import DEFAULT, new_model
from tests.attention.worlds import numbers

VECTOR = load("xpos")
Q, K, V = (VECTOR[f"in_{name}"] for name in "qkv")


def attention():
    return over_heads(Q, XPos(scale_base=float(VECTOR["cfg_scale_base"])))


def test_scores_and_attention():
    module, mask = attention(), after_memory(Q, K)
    k = module.position.key(K, mask.key.position)
    q, bias = module.position.encode(Q, k, Q.shape[-1], mask, None)
    close(q @ k.transpose(-1, -2) + bias * Q.shape[-1] ** 0.5, VECTOR["out_scores"])
    close(module.average(Q, k, V, mask, None), VECTOR["out"])


@pytest.mark.parametrize("start", [10**3, 10**6])
def test_attention_does_not_depend_on_the_start(start):
    module, key = attention(), TokenIndex.range(len(K), K.shape[2], start)
    mask = AttentionMask(key.last(Q.shape[2]), key, Full(), True, torch.float64)
    k = module.position.key(K, key.position)
    close(module.average(Q, k, V, mask, None), VECTOR["out"], 1e-8)


@pytest.mark.parametrize("pattern", [Full(), Window(40)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_pass_equals_steps(pattern, dtype, monkeypatch):
    """Scales of the first and of the last query of a pass have no common origin without overflow."""
    monkeypatch.setattr(plan, "MIN_SPARSE_PAIRS", 0)
    spec = replace(DEFAULT, position=XPos(scale_base=0.5), pattern=pattern)
    model, slot = new_model(spec).to(dtype), torch.arange(150)
    index = TokenIndex(torch.stack([slot, slot % 90]), torch.stack([0 * slot, slot // 90]))
    x = numbers(2, 150, spec.width).to(dtype)
    cache = model.cache(model.initial_state(2), 150)
    steps = [model.step(x[:, t], index.at(slice(t, t + 1)), cache)[0] for t in range(150)]
    torch.testing.assert_close(model(x, index)[0], torch.stack(steps, dim=1), rtol=1e-5, atol=1e-5)
    last = model.outputs(x, index, output_slice=slice(2, None, 3))
    torch.testing.assert_close(last, torch.stack(steps, dim=1)[:, 2::3], rtol=1e-5, atol=1e-5)


def test_attention_over_long_passes_is_finite():
    q = torch.randn(1, 1, 1, 8)
    key = TokenIndex(torch.tensor([[0, 10**6, 0]]), torch.tensor([[0, 0, 1]]))
    module, k = over_heads(q, XPos()), torch.randn(1, 1, 3, 8)
    mask = AttentionMask(key.last(1), key, Full(), True, torch.float32)
    close(module.average(q, k, k, mask, None), k[:, :, 2:], 1e-6)
    mask = AttentionMask(key.at(slice(1, 2)), key, Full(), True, torch.float32)
    assert module.average(q, k, k, mask, None).isfinite().all()


def test_a_scale_base_without_a_decay():
    """Its span exceeds an integer of torch."""
    model = TransformerSpec(width=16, heads=2, layers=1, position=XPos(scale_base=1e18)).build()
    assert model(torch.randn(1, 3, 16), TokenIndex.range(1, 3))[0].isfinite().all()
