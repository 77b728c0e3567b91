"""Linformer reproduces public code, for each method and kind of sharing, and torch's pooling."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention import Full, Linformer, TokenIndex
from rlxf.attention.attention import Attention
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.attention_options import AttentionArguments
from tests.attention.oracle import close, fill, load, put
from tests.attention.worlds import numbers

VECTOR = load("linformer")
SHARING = {"none": "none", "headwise": "head", "kv": "key-value", "layerwise": "layer"}
METHODS = {"learnable": "learned", "convolution": "convolution"}
HEADS = sum(key.startswith("w_none_learnable_q") for key in VECTOR)


def attend(module: Attention, x: Tensor) -> Tensor:
    index = TokenIndex.range(*x.shape[:2])
    return module(x, None, AttentionMask(index, index, Full(), False, x.dtype))


def attention(kernel: Linformer, weights: list[Tensor], out: Tensor, bias: Tensor) -> Attention:
    """Return a module with weights (C, C) of q, k, v and the output, for ``y = x @ w``."""
    module = Attention(AttentionArguments(len(out), HEADS, None, kernel)).double()
    fill(module.qkv, torch.cat([weight.T for weight in weights]))
    fill(module.out, out.T, bias)
    return module


def test_shared_projection_of_heads():
    e, f = VECTOR["w_E"], VECTOR["w_F"]
    weights = [VECTOR[f"w_{name}"] for name in "qkv"]
    module = attention(Linformer(*e.shape, sharing="head"), weights, VECTOR["w_o"], VECTOR["w_bo"])
    put(module.kernel.key_projection.weight, e[None])
    put(module.kernel.value_projection.weight, f[None])
    close(attend(module, VECTOR["in_x"]), VECTOR["out"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sharing", SHARING)
def test_sharing_and_methods(sharing, method):
    """The weights of the vectors are stored in float32."""
    name = f"{sharing}_{method}"

    def of_heads(letter: str) -> list[Tensor]:
        return [VECTOR[f"w_{name}_{letter}{head}"].double() for head in range(HEADS)]

    x, first = VECTOR[f"in_x_{name}"], of_heads("E")[0]
    length = x.shape[1]
    k = first.shape[1] if method == "learnable" else length // first.shape[2]
    kernel = Linformer(length, k, METHODS[method], SHARING[sharing], bias=True)
    weights = [torch.cat(of_heads(letter), dim=1) for letter in "qkv"]
    out, bias = (VECTOR[f"w_{name}_{key}"].double() for key in ("o", "bo"))
    module = attention(kernel, weights, out, bias)
    for letter, projection in (("E", module.kernel.key_projection), ("F", module.kernel.value_projection)):
        heads = len(projection.weight)
        assert heads == (1 if VECTOR[f"cfg_{name}_same_heads"] else HEADS)
        put(projection.weight, torch.stack(of_heads(letter)[:heads]))
        put(projection.bias, torch.stack(of_heads(f"b{letter}")[:heads]))
    assert (module.kernel.key_projection is module.kernel.value_projection) == bool(
        VECTOR[f"cfg_{name}_same_EF"]
    )
    close(attend(module, x), VECTOR[f"out_{name}"], 1e-6)


def pooled_sizes() -> tuple[int, int]:
    """Return n and k of the convolutions."""
    length = VECTOR["in_x_none_convolution"].shape[1]
    return length, length // VECTOR["w_none_convolution_E0"].shape[2]


@pytest.mark.parametrize(("method", "pool"), [("mean", F.avg_pool1d), ("max", F.max_pool1d)])
def test_pooling_equals_torch(method, pool):
    length, k = pooled_sizes()
    q, keys, values = (numbers(2, HEADS, length, 3, seed=seed) for seed in range(3))
    index = TokenIndex.range(2, length)
    kernel = Linformer(length, k, method).build(3 * HEADS, HEADS)
    output = kernel(q, keys, values, None, AttentionMask(index, index, Full(), False, q.dtype))
    pooled = [pool(x.flatten(0, 1).mT, length // k).mT.unflatten(0, (2, HEADS)) for x in (keys, values)]
    close(output, F.scaled_dot_product_attention(q, *pooled), 1e-12)


def test_mean_equals_a_block_projection():
    length, k = pooled_sizes()
    q, keys, values = (numbers(2, HEADS, length, 3, seed=seed) for seed in range(3))
    index = TokenIndex.range(2, length)
    mask = AttentionMask(index, index, Full(), False, q.dtype)
    mean, learned = (
        Linformer(length, k, method, "none").build(3 * HEADS, HEADS).double()
        for method in ("mean", "learned")
    )
    blocks = torch.eye(k, dtype=q.dtype).repeat_interleave(length // k, dim=0) * k / length
    for projection in (learned.key_projection, learned.value_projection):
        put(projection.weight, blocks.expand(HEADS, -1, -1))
    close(learned(q, keys, values, None, mask), mean(q, keys, values, None, mask), 1e-12)


def test_identity_projection_equals_softmax_attention():
    """With E = F = I, Linformer equals softmax attention."""
    length = 7
    q, keys, values = (numbers(2, HEADS, length, 3, seed=seed) for seed in range(3))
    index = TokenIndex.range(2, length)
    kernel = Linformer(length, length, sharing="key-value").build(3 * HEADS, HEADS).double()
    put(kernel.key_projection.weight, torch.eye(length, dtype=q.dtype)[None])
    output = kernel(q, keys, values, None, AttentionMask(index, index, Full(), False, q.dtype))
    close(output, F.scaled_dot_product_attention(q, keys, values), 1e-12)
