"""Pairs beyond the reach of a span are skipped without effect, for every pattern."""

from dataclasses import replace

import pytest
import torch

from rlxf.attention import (
    ETC,
    XL,
    AdaptiveSpan,
    BigBirdETC,
    DynamicSpan,
    Full,
    HeadKernels,
    Longformer,
    Softmax,
    Strided,
    TokenIndex,
    Tupe,
    Window,
)
from rlxf.attention.kernels.span import AdaptiveSpanAttention, DynamicSpanAttention
from rlxf.attention.patterns.base import UNLIMITED
from rlxf.attention.sparse import plan
from tests.attention.specs import DEFAULT as SPEC
from tests.attention.specs import new_model
from tests.attention.worlds import numbers

LENGTH = 40
PATTERNS = [Full(), Window(30), Strided(4), ETC(3, 2), BigBirdETC(4, 1, 2, 2), Longformer(4, global_tokens=2)]


@pytest.mark.parametrize("kernel", [DynamicSpan(5, 3), AdaptiveSpan(5, 3)], ids=repr)
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("small", [0, 1 << 16], ids=["gathered", "all pairs"])
def test_keys_beyond_the_reach_have_no_effect(kernel, pattern, causal, small, monkeypatch):
    monkeypatch.setattr(plan, "MIN_SPARSE_PAIRS", small)
    model = new_model(replace(SPEC, kernel=kernel, pattern=pattern, causal=causal)).double()
    x, index = numbers(1, LENGTH, SPEC.width).double(), TokenIndex.range(1, LENGTH)
    near, _ = model(x, index)
    for average in (DynamicSpanAttention, AdaptiveSpanAttention):
        monkeypatch.setattr(average, "max_distance", UNLIMITED)
    far, _ = model(x, index)
    torch.testing.assert_close(near, far)


def test_reach_bounds_the_pattern():
    model = new_model(replace(SPEC, kernel=DynamicSpan(5, 3), memory=XL(30)))
    index = TokenIndex.range(1, LENGTH)
    assert {mask.pattern.max_distance for mask in model.attention_masks(index, index)} == {8}


@pytest.mark.parametrize("kernel", [AdaptiveSpan, DynamicSpan])
def test_limit_plus_ramp_is_bounded(kernel):
    with pytest.raises(ValueError, match=f"{kernel.__name__} limit \\+ ramp must be at most"):
        kernel(2**30, 2**30)


@pytest.mark.parametrize("pattern", [Full(), Longformer(4), ETC(3, 2), BigBirdETC(4, 1, 2, 2)], ids=repr)
@pytest.mark.parametrize("causal", [True, False])
def test_penalty_counts_each_token_once(pattern, causal):
    """Global tokens have their own projections, and are no queries of the other tokens' module."""
    model = new_model(replace(SPEC, layers=1, pattern=pattern, kernel=DynamicSpan(10, 2, 1.0), causal=causal))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".span." in name:
                parameter.zero_()
    model(numbers(1, LENGTH, SPEC.width).float(), TokenIndex.range(1, LENGTH))
    torch.testing.assert_close(model.penalty(), torch.tensor(5.0))


@pytest.mark.parametrize(
    "kernel", [AdaptiveSpan(), DynamicSpan(), HeadKernels(Softmax(), DynamicSpan(), 1)], ids=repr
)
def test_spans_of_a_decoder_are_refused(kernel):
    """Positions of a context do not count from the same start as those of its queries."""
    with pytest.raises(ValueError, match=r"Span\(.* cross_attention=True .* choose another kernel"):
        replace(SPEC, kernel=kernel, cross_attention=True)


def test_global_tokens_use_positions():
    spec = replace(SPEC, pattern=ETC(3, 4), position=Tupe(16), causal=False)
    model = new_model(spec).double()
    model(numbers(1, 12, SPEC.width), TokenIndex.range(1, 12))
    with pytest.raises(
        ValueError, match=r"position 19 .* the extra global tokens of a bidirectional pattern"
    ):
        model(numbers(1, 16, SPEC.width), TokenIndex.range(1, 16))
