"""Grouped queries, QK-norm and gated attention reproduce published implementations, with their weights.

Keys are M tokens of memory and T current ones; queries are the current ones.
"""

import pytest
import torch
from torch import Tensor

from rlxf.attention import XL, Full, RoPE, Softmax, TokenIndex, TransformerSpec
from rlxf.attention.attention import Attention
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.attention_options import AttentionArguments, AttentionOptions
from rlxf.attention.relative import DistanceTables
from tests.attention.oracle import Vector, close, fill, load, put

GROUPED, NORM, GATED = load("gqa"), load("qk_norm"), load("gated")


def causal_mask(batch: int, memory: int, length: int) -> AttentionMask:
    key = TokenIndex.range(batch, memory + length)
    return AttentionMask(key.last(length), key, Full(), True, torch.float64)


def build(vector: Vector, options: AttentionOptions, rope: RoPE | None = None) -> Attention:
    """Create attention with the projections of a vector."""
    width, heads = vector["in_x"].shape[-1], int(vector["cfg_heads"])
    module = Attention(AttentionArguments(width, heads, rope, Softmax(), 0.0, options)).double()
    fill(module.qkv, torch.cat([vector[f"w_{name}"].T for name in "qkv"]))
    fill(module.out, vector["w_o"].T)
    return module


def over_memory(module: Attention, vector: Vector) -> Tensor:
    x, memory = vector["in_x"], vector["in_memory"]
    return module(x, module.project(memory), causal_mask(len(x), memory.shape[1], x.shape[1]))


def step_by_step(module: Attention, vector: Vector) -> Tensor:
    """Compute the same with the KV cache, one token at a time, after the tokens of memory."""
    tokens = torch.cat([vector["in_memory"], vector["in_x"]], dim=1)
    batch, length, width = tokens.shape
    index, empty = TokenIndex.range(batch, length), TokenIndex.empty(batch, length, tokens.device)
    cache = module.cache(
        module.project(torch.zeros(batch, length, width).double()),
        empty,
        DistanceTables(torch.zeros(1).long(), None, 0),
    )
    outputs = []
    for slot in range(length):
        now = index.at(slice(slot, slot + 1))
        empty.write(slice(None), slot, now)
        mask = AttentionMask(now, empty, Full(), True, torch.float64)
        outputs.append(module.step(tokens[:, slot : slot + 1], cache, slot, mask))
    return torch.cat(outputs[-vector["in_x"].shape[1] :], dim=1)


@pytest.mark.parametrize("name", ["grouped", "multi_query"])
def test_shared_key_heads(name):
    q, k, v = (GROUPED[f"in_{name}_{kind}"] for kind in "qkv")
    options = AttentionOptions(kv_heads=k.shape[1])
    module = Attention(
        AttentionArguments(q.shape[1] * q.shape[3], q.shape[1], None, Softmax(), 0.0, options)
    ).double()
    mask = causal_mask(len(q), int(GROUPED["cfg_memory"]), q.shape[2])
    close(module.average(q, k, v, mask, None), GROUPED[f"out_{name}"])
    assert module.project(torch.ones(2, 5, module.width).double())[0].shape == (2, k.shape[1], 5, q.shape[3])


def interleaved(x: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head: the reference rotates pairs (n, n + D / 2), we (2 n, 2 n + 1)."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def rotated(form: str, query_weight: Tensor, key_weight: Tensor) -> Attention:
    """Create attention with RMS norms of queries and keys, and rotations."""
    heads, width = int(NORM["cfg_heads"]), NORM["in_x"].shape[-1]
    module = build(NORM, AttentionOptions(qk_norm=form), RoPE(base=10000))
    q, k, v = module.qkv.weight.detach().split(width)
    fill(module.qkv, torch.cat([interleaved(q, heads), interleaved(k, heads), v]))
    normalized_heads = len(query_weight) * heads // width
    put(module.query_norm.weight, interleaved(query_weight, normalized_heads))
    put(module.key_norm.weight, interleaved(key_weight, normalized_heads))
    return module


@pytest.mark.parametrize("run", [over_memory, step_by_step])
@pytest.mark.parametrize(("name", "form"), [("qwen3", "rms"), ("olmo2", "rms_all_heads")])
def test_rms_norm(name, form, run):
    module = rotated(form, NORM[f"w_{name}_q_norm"], NORM[f"w_{name}_k_norm"])
    close(run(module, NORM), NORM[f"out_{name}"])


@pytest.mark.parametrize("run", [over_memory, step_by_step])
def test_rms_norm_with_shifted_weights_and_another_scale(run):
    """The weight is ``1 + w``, and scores are divided by another root than that of D."""
    scale = (NORM["w_gemma3_q_norm"].shape[0] / NORM["cfg_gemma3_scalar"]) ** 0.5
    module = rotated("rms", (1 + NORM["w_gemma3_q_norm"]) * scale, 1 + NORM["w_gemma3_k_norm"])
    close(run(module, NORM), NORM["out_gemma3"])


@pytest.mark.parametrize("run", [over_memory, step_by_step])
def test_l2_norm(run):
    module = build(NORM, AttentionOptions(qk_norm="l2"))
    put(module.query_norm.scale, NORM["w_l2_scale"])
    close(run(module, NORM), NORM["out_l2"])


@pytest.mark.parametrize("run", [over_memory, step_by_step])
@pytest.mark.parametrize("form", ["elementwise", "headwise"])
def test_output_gate(form, run):
    name = {"elementwise": "element", "headwise": "head"}[form]
    module = build(GATED, AttentionOptions(attention_gate=form))
    fill(module.output_gate.linear, GATED[f"w_gate_{name}"].T)
    close(run(module, GATED), GATED[f"out_{name}"])


@pytest.mark.parametrize("run", [over_memory, step_by_step])
def test_output_gate_and_norm(run):
    module = build(GATED, AttentionOptions(qk_norm="rms", attention_gate="elementwise"))
    fill(module.output_gate.linear, GATED["w_gate_element"].T)
    put(module.query_norm.weight, 1 + GATED["w_q_norm"])
    put(module.key_norm.weight, 1 + GATED["w_k_norm"])
    close(run(module, GATED), GATED["out_qwen3_next"])


def test_shared_key_heads_make_the_cache_smaller():
    caches = [
        TransformerSpec(width=16, heads=4, kv_heads=kv_heads, memory=XL(3)).build()
        for kv_heads in (None, 4, 2, 1)
    ]
    sizes = [
        sum(
            layer.keys.numel() + layer.values.numel()
            for layer in model.cache(model.initial_state(2), 4).layers
        )
        for model in caches
    ]
    assert sizes == [sizes[0], sizes[0], sizes[0] // 2, sizes[0] // 4]
