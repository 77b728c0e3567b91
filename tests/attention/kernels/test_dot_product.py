"""Scaled dot-product attention has the same results in both forms of torch."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from rlxf.attention.kernels import softmax
from rlxf.attention.kernels.softmax import LONGEST, Softmax, SoftmaxAttention, dot_product_attention
from rlxf.utils.matrix_products import products

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


@pytest.fixture
def fused_calls(monkeypatch):
    """Calls of torch's fused attention, while products use oneDNN."""
    calls, fused = [], F.scaled_dot_product_attention

    def count(*args, **options):
        calls.append(args)
        return fused(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", count)
    monkeypatch.setattr(products, "in_use", True)
    return calls


def attend(keys, queries=2, device="cpu", dtype=torch.float32):
    """Attend by `Softmax` and by the function."""
    q, k = (torch.ones(1, 1, length, D, device=device, dtype=dtype) for length in (queries, keys))
    mask = torch.zeros(1, 1, queries, keys, device=device, dtype=dtype)
    SoftmaxAttention()(q, k, k, None, SimpleNamespace(mask=mask, dtype=dtype))
    dot_product_attention(q, k, k)


@pytest.mark.parametrize(("keys", "used"), [(LONGEST, True), (LONGEST + 1, False)])
def test_whole_matrices_are_multiplied_for_few_keys_only(fused_calls, keys, used):
    attend(keys)
    assert len(fused_calls) == (0 if used else 2)


def test_memory_of_the_scores_is_limited(fused_calls, monkeypatch):
    """Backward needs all scores, which the fused kernel computes again."""
    monkeypatch.setattr(softmax, "LARGEST", 20)
    attend(keys=10)
    assert not fused_calls
    attend(keys=10, queries=3)
    assert len(fused_calls) == 2


@pytest.mark.parametrize("other", [{"device": "meta"}, {"dtype": torch.float64}])
def test_other_devices_and_types_use_the_fused_kernel(fused_calls, other):
    attend(keys=4, **other)
    assert len(fused_calls) == 2


class HalvedWeights(SoftmaxAttention):
    """Attention with half of the weights of a softmax."""

    def weights(self, *arguments):
        return super().weights(*arguments) / 2


@pytest.mark.parametrize("length", [2, LONGEST + 1])
def test_overridden_weights_are_used_for_any_number_of_keys(length):
    q, mask = torch.ones(1, 1, length, D), torch.zeros(1, 1, length, length)
    y = HalvedWeights()(q, q, q, None, SimpleNamespace(mask=mask, dtype=q.dtype))
    torch.testing.assert_close(y, q / 2)


def test_kernel_with_another_module_is_no_softmax_over_all_keys_unless_it_says_so():
    class Halved(Softmax):
        def build(self, width, heads):
            return HalvedWeights()

    class Declared(Halved):
        softmax_distance = 7

    assert Halved().softmax_distance == 0
    assert Declared().softmax_distance == 7
