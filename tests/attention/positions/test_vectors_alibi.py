"""ALiBi reproduces the authors' slopes for every head count, and both forms of the penalty."""

import pytest
import torch

from rlxf.attention import ALiBi, Full, Softmax, TokenIndex
from rlxf.attention.attention import Attention
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.attention_options import AttentionArguments
from rlxf.attention.positions.alibi import slopes
from tests.attention.oracle import close, fill, load

VECTOR = load("alibi")
SLOPES = sorted(key for key in VECTOR if key.startswith("out_slopes_"))


@pytest.mark.parametrize("key", SLOPES)
def test_slopes(key):
    expected = VECTOR[key]
    close(slopes(len(expected)), expected, 1e-7)


def test_the_slopes_are_exact_after_a_cast_of_the_model():
    embedding = ALiBi().build_embedding(12, 12)
    before = embedding.table(torch.arange(9), True)
    assert torch.equal(embedding.bfloat16().float().table(torch.arange(9), True), before)


@pytest.mark.parametrize(("causal", "out"), [(True, "out_causal"), (False, "out_symmetric")])
def test_attention(causal, out):
    q, k, v = (VECTOR[f"in_{name}"] for name in "qkv")
    batch, heads, length, size = q.shape
    identity = torch.eye(heads * size, dtype=torch.float64)
    attention = Attention(AttentionArguments(heads * size, heads, ALiBi(), Softmax())).double()
    fill(attention.qkv, identity.repeat(3, 1))
    fill(attention.out, identity)
    index = TokenIndex.range(batch, length)
    shared = ALiBi().build_embedding(heads * size, heads)
    mask = AttentionMask(index, index, Full(), causal, torch.float64, shared)
    y = attention.cross(q.transpose(1, 2).flatten(2), (k, v), mask)
    close(y, VECTOR[out].transpose(1, 2).flatten(2), 1e-7)
