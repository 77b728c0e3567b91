"""Differential attention reproduces the authors' code, with its weights."""

import pytest
import torch

from rlxf.attention import XL, Differential, Full, RoPE, TokenIndex, TransformerSpec
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.differential import DifferentialAttention
from tests.attention.oracle import close, fill, load, put

VECTOR = load("differential")
X, MEMORY = VECTOR["in_x"], VECTOR["in_memory"]
WIDTH, HEADS = X.shape[-1], int(VECTOR["cfg_heads"])


def attention(position: RoPE | None) -> DifferentialAttention:
    layer = int(VECTOR["cfg_depth"])
    spec = TransformerSpec(
        width=WIDTH, heads=HEADS, layers=layer + 1, kernel=Differential(), position=position
    )
    module = spec.build().double().blocks[layer].attention
    fill(module.qkv, torch.cat([VECTOR[f"w_{name}"].T for name in "qkv"]))
    fill(module.out, VECTOR["w_out"].T)
    put(module.lambdas, torch.stack([VECTOR[f"w_lambda_{name}"] for name in ("q1", "k1", "q2", "k2")]))
    put(module.norm.weight, VECTOR["w_subln"])
    return module


@pytest.mark.parametrize(("position", "output"), [(None, "out"), (RoPE(base=10000), "out_rope")])
def test_attention_over_memory(position, output):
    module = attention(position)
    close(module.lambda_, VECTOR["out_lambda"])
    key = TokenIndex.range(len(X), MEMORY.shape[1] + X.shape[1])
    mask = AttentionMask(key.last(X.shape[1]), key, Full(), True, torch.float64, heads=2 * HEADS)
    close(module(X, module.project(MEMORY), mask), VECTOR[output])


def test_grouped_heads_equal_heads_with_repeated_weights():
    """Map n of head h reads half n of key h K // H."""
    grouped = TransformerSpec(
        width=16, heads=4, kv_heads=2, kernel=Differential(), position=RoPE(), memory=XL(3)
    ).build()
    full = TransformerSpec(width=16, heads=4, kernel=Differential(), position=RoPE(), memory=XL(3)).build()
    weights = grouped.state_dict()
    for name, value in weights.items():
        if "qkv" in name:
            q, k, v = value.split([16, 8, 8])
            repeated = [x.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1) for x in (k, v)]
            weights[name] = torch.cat([q, *repeated])
    full.load_state_dict(weights)
    x, index = torch.linspace(-2, 2, 160).sin().view(1, 10, 16), TokenIndex.range(1, 10)
    close(grouped(x, index)[0], full(x, index)[0], 1e-6)


def test_initial_lambda_of_a_layer():
    assert attention(None).initial_lambda == pytest.approx(float(VECTOR["cfg_lambda_init"]), abs=1e-12)


def test_weights_sum_to_one_minus_lambda():
    module = attention(None)
    index = TokenIndex.range(*X.shape[:2])
    mask = AttentionMask(index, index, Full(), True, torch.float64, heads=2 * HEADS)
    weights = module.weights(X, None, mask)
    assert weights.shape == (len(X), HEADS, X.shape[1], X.shape[1])
    close(weights.sum(-1), (1 - module.lambda_).expand(weights.shape[:-1]))
