"""T5's buckets, bias and attention reproduce HF transformers, causal and bidirectional."""

import pytest
import torch
from torch import Tensor

from rlxf.attention import T5Bias, TokenIndex, TransformerSpec
from tests.attention.oracle import close, fill, load, put

VECTOR = load("t5_bias")
SPEC = T5Bias(int(VECTOR["cfg_num_buckets"]), int(VECTOR["cfg_max_distance"]))
SIDES = pytest.mark.parametrize(("side", "causal"), [("bidirectional", False), ("causal", True)])


def relative(buckets: Tensor) -> Tensor:
    """Return the vector's differences of key and query positions, from -n to n."""
    n = len(buckets) // 2
    return torch.arange(-n, n + 1)


@SIDES
@pytest.mark.parametrize(
    ("spec", "size"), [(SPEC, ""), (T5Bias(), "default32_128_")], ids=["small", "default"]
)
def test_buckets(spec, size, side, causal):
    expected = VECTOR[f"out_buckets_{size}{side}"]
    assert torch.equal(spec.bucket(-relative(expected), causal), expected)


@SIDES
def test_bias_and_attention(side, causal):
    x, weights = VECTOR[f"in_x_{side}"], {name: VECTOR[f"w_{name}_{side}"] for name in ("q", "k", "v", "o")}
    heads, (batch, length, width) = VECTOR[f"w_table_{side}"].shape[1], x.shape
    spec = TransformerSpec(width=width, heads=heads, layers=1, position=SPEC, causal=causal)
    model = spec.build().double()
    put(model.embedding.weight, VECTOR[f"w_table_{side}"])
    attention = model.blocks[0].attention
    q_weight = weights["q"] * (width / heads) ** 0.5
    fill(attention.qkv, torch.cat([q_weight.T, weights["k"].T, weights["v"].T]))
    fill(attention.out, weights["o"].T)
    index = TokenIndex.range(batch, length)
    mask = model.attention_mask(index, index)
    expected, bias = VECTOR[f"out_bias_{side}"], mask.bias
    close(bias.where(mask.allowed[:1, None], 0.0), expected.where(mask.allowed[:1, None], 0.0))
    close(attention(x, None, mask), VECTOR[f"out_attn_{side}"])
