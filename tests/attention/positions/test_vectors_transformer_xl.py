"""Transformer-XL's attention and model reproduce the authors' code, segment by segment."""

from itertools import pairwise

import torch
from torch import Tensor

from rlxf.attention import XL, State, TokenIndex, Transformer, TransformerSpec, XLRelative
from rlxf.attention.attention_mask import AttentionMask
from tests.attention.oracle import Vector, close, count, fill, load, named, put

ATTENTION = load("transformer_xl_attention")
MODEL = load("transformer_xl_model")

# The authors' sinusoid table is float32: their output differs by 7e-9 from the formula in float64.
AUTHORS = 1e-7


def batch_first(x: Tensor) -> Tensor:
    """Transpose (T, B, C) of the authors' code to (B, T, C)."""
    return x.transpose(0, 1)


def test_attention_over_memory_in_a_post_norm_layer():
    x, memory = batch_first(ATTENTION["in_w"]), batch_first(ATTENTION["in_mem"])
    heads, (batch, length, width) = ATTENTION["w_u"].shape[0], x.shape
    spec = TransformerSpec(width=width, heads=heads, layers=1, position=XLRelative(), norm="post")
    block = spec.build().double().blocks[0]
    fill(block.attention.qkv, torch.cat([ATTENTION[name].T for name in ("w_q", "w_k", "w_v_proj")]))
    fill(block.attention.out, ATTENTION["w_o"].T)
    fill(block.attention.position.r, ATTENTION["w_r"].T)
    put(block.attention.position.u, ATTENTION["w_u"])
    put(block.attention.position.v, ATTENTION["w_v"])
    fill(block.attention_norm.norm, ATTENTION["w_ln_g"], ATTENTION["w_ln_b"])
    key = TokenIndex.range(batch, memory.shape[1] + length)
    mask = AttentionMask(key.last(length), key, spec.pattern, True, x.dtype)
    close(block.attend(x, memory, mask), batch_first(ATTENTION["out"]), AUTHORS)


def build(memory: int) -> Transformer:
    inner, width = MODEL["w_layers__0__pos_ff__CoreNet__0__weight_T_out_in"].shape
    shape = {"width": width, "heads": MODEL["w_r_w_bias_T_out_in"].shape[0], "feed_forward": inner}
    shape |= {"layers": count(MODEL, "layers"), "norm": "post", "final_norm": False}
    model = TransformerSpec(position=XLRelative(), memory=XL(memory), **shape).build().double()
    for number, block in enumerate(model.blocks):
        load_block(block, MODEL, f"layers.{number}")
    return model


def load_block(block, vector: Vector, layer: str) -> None:
    fill(block.attention.qkv, *named(vector, f"{layer}.dec_attn.qkv_net."))
    fill(block.attention.out, *named(vector, f"{layer}.dec_attn.o_net."))
    fill(block.attention.position.r, *named(vector, f"{layer}.dec_attn.r_net."))
    put(block.attention.position.u, vector["w_r_w_bias_T_out_in"])
    put(block.attention.position.v, vector["w_r_r_bias_T_out_in"])
    fill(block.attention_norm.norm, *named(vector, f"{layer}.dec_attn.layer_norm."))
    fill(block.feed_forward.inner, *named(vector, f"{layer}.pos_ff.CoreNet.0."))
    fill(block.feed_forward.outer, *named(vector, f"{layer}.pos_ff.CoreNet.3."))
    fill(block.feed_forward_norm.norm, *named(vector, f"{layer}.pos_ff.layer_norm."))


def tokens() -> Tensor:
    table = MODEL["w_word_emb__emb_layers__0__weight_T_out_in"]
    return batch_first(table[MODEL["in_ids"]]) * table.shape[-1] ** 0.5


def segments(model: Transformer) -> list[tuple[Tensor, State]]:
    """Return the output of each segment and the state after it."""
    x, length = tokens(), MODEL["out_hidden"].shape[1]
    results, state = [], None
    for start, end in pairwise(range(0, x.shape[1] + 1, length)):
        index = TokenIndex.range(x.shape[0], length, start=start)
        y, state = model(x[:, start:end], index, state)
        results.append((y, state))
    return results


def test_segments_with_memory():
    results = segments(build(memory=MODEL["out_mems"].shape[2]))
    assert len(results) == len(MODEL["out_hidden"])
    for (y, _), expected in zip(results, MODEL["out_hidden"], strict=True):
        close(y, batch_first(expected), AUTHORS)


def test_memories_are_the_inputs_of_the_layers():
    results = segments(build(memory=MODEL["out_mems"].shape[2]))
    for (_, state), expected in zip(results, MODEL["out_mems"], strict=True):
        close(state.hidden, expected[:-1].transpose(1, 2), AUTHORS)


def test_one_long_segment():
    x = tokens()
    y, _ = build(memory=1)(x, TokenIndex.range(*x.shape[:2]))
    close(y, batch_first(MODEL["out_long_hidden"]), AUTHORS)


def test_segments_with_full_memory_equal_one_long_segment():
    results = segments(build(memory=MODEL["in_ids"].shape[0]))
    y = torch.cat([y for y, _ in results], dim=1)
    close(y, batch_first(MODEL["out_long_hidden"]), AUTHORS)
