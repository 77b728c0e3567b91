"""Scaled dot-product attention has the same results in both forms of torch."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from rlxf.attention.dot_product import LONGEST, dot_product_attention
from rlxf.attention.kernels.softmax import SoftmaxAttention
from rlxf.utils.matrix_products import SMALLEST, float32_products, onednn_is_faster, products

B, H, T, D = 2, 3, 5, 4


def masks():
    visible = torch.ones(T, T, dtype=torch.bool).tril()
    nothing = visible.clone()
    nothing[2] = False
    terms = torch.zeros(T, T).masked_fill(~visible, -torch.inf)
    return {"none": None, "visible": visible, "row without keys": nothing, "terms": terms}


def outcome(mask):
    """Return the result and the gradients of random queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(B, H, T, D, generator=generator, requires_grad=True) for _ in range(3)]
    y = dot_product_attention(*parts, mask)
    return y.detach(), *torch.autograd.grad(y.square().sum(), parts)


@pytest.mark.parametrize("name", masks())
def test_both_forms_have_the_same_results_and_gradients(monkeypatch, name):
    monkeypatch.setattr(products, "in_use", False)
    fused = outcome(masks()[name])
    monkeypatch.setattr(products, "in_use", True)
    for found, expected in zip(outcome(masks()[name]), fused, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("keys", "used"), [(LONGEST, True), (LONGEST + 1, False)])
def test_whole_matrices_are_multiplied_for_few_keys_only(monkeypatch, keys, used):
    """In `Softmax` and in the function; the fused kernel is called otherwise."""
    calls, fused = [], F.scaled_dot_product_attention

    def count(*args, **options):
        calls.append(torch.backends.cuda.flash_sdp_enabled())
        return fused(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", count)
    monkeypatch.setattr(products, "in_use", True)
    q, k = torch.ones(1, 1, 2, D), torch.ones(1, 1, keys, D)
    dot_product_attention(q, k, k)
    assert calls == [not used]
    SoftmaxAttention()(q, k, k, None, SimpleNamespace(mask=torch.zeros(1, 1, 2, keys), dtype=torch.float32))
    assert len(calls) == (1 if used else 2)


def test_setting_is_in_use_within_large_products_only():
    assert not products.in_use
    with float32_products(SMALLEST - 1):
        assert not products.in_use
    with float32_products(SMALLEST):
        assert products.in_use == onednn_is_faster()
    assert not products.in_use
