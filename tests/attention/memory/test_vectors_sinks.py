"""Attention sinks against the authors' cache (StreamingLLM), and learned sink logits against gpt-oss."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlxf.attention import (
    AttentionSinks,
    ETCLabels,
    RoPE,
    SinkSoftmax,
    StreamingXL,
    TokenIndex,
    TransformerSpec,
    XPos,
)
from rlxf.attention.attention import Attention
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.attention_options import AttentionArguments
from rlxf.attention.patterns.window import Full
from tests.attention.oracle import close, load, put
from tests.attention.passes import attend, over_heads
from tests.attention.worlds import numbers

STREAM, LEARNED = load("sinks_stream"), load("sinks_learned")
START, RECENT = int(STREAM["cfg_start"]), int(STREAM["cfg_recent"])
WAYS = pytest.mark.parametrize(("way", "extra"), [("generate", 0), ("evaluate", 1)])
"""Ways of the authors to evict keys: a window of w or of w + 1 tokens, including the query's own."""


@WAYS
def test_pattern_sees_what_the_cache_keeps(way, extra):
    length = STREAM["in_q"].shape[2]
    where = TokenIndex.range(1, length)
    mask = AttentionMask(where, where, AttentionSinks(RECENT + extra, START), True, torch.float64)
    assert torch.equal(mask.allowed[0], STREAM[f"out_keep_{way}"])


@WAYS
def test_pattern_gives_the_outputs_of_the_cache(way, extra):
    q, k, v = (STREAM[f"in_{name}"] for name in "qkv")
    where = TokenIndex.range(len(q), q.shape[2])
    mask = AttentionMask(where, where, AttentionSinks(RECENT + extra, START), True, q.dtype)
    close(attend(over_heads(q, None), q, k, v, mask), merged(STREAM[f"out_{way}"]))


def adjacent_pairs(x: Tensor) -> Tensor:
    """Reorder features (..., D): pairs (n, n + D / 2), as in Llama, become adjacent."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


@WAYS
@pytest.mark.parametrize("cuts", [[17], [3, 5, 2, 7], [1] * 17], ids=str)
@pytest.mark.parametrize("position", [None, RoPE()], ids=["", "rope"])
def test_memory_gives_the_outputs_of_the_cache(way, extra, cuts, position):
    """The inputs of the layer are [q; k; v], which its weights only separate into heads.

    Rotations are by the position in the cache, which the memory changes for the sinks.
    """
    unchanged = torch.Tensor.contiguous
    changes = (adjacent_pairs, adjacent_pairs, unchanged) if position else (unchanged,) * 3
    q, k, v = (merged(change(STREAM[f"in_{name}"])) for name, change in zip("qkv", changes, strict=True))
    x, width = torch.cat([q, k, v], dim=-1), q.shape[-1]
    memory = StreamingXL(RECENT + extra - 1, START)
    model = (
        TransformerSpec(width=3 * width, heads=3 * STREAM["in_q"].shape[1], memory=memory).build().double()
    )
    module = over_heads(STREAM["in_q"], position)
    state, outputs, start = model.initial_state(len(x)), [], 0
    for length in cuts:
        part, where = x[:, start : start + length], TokenIndex.range(len(x), length, start)
        view = model.memory_view(state, where)
        (mask, *_) = view.adapt_masks(model.attention_masks(where, view.key))
        _, keys, values = torch.cat([view.tokens(0, part), part], dim=1).split(width, dim=-1)
        q, k, v = (module.split(y)[0] for y in (part[..., :width], keys, values))
        outputs.append(attend(module, q, module.position.key(k, view.key.position), v, mask))
        hidden = torch.stack([part] * model.spec.layers)
        runs_of = model._recurrent_passes(state.recurrent, where)
        carry = memory.carry(state.recurrent.memory, hidden, runs_of.runs)
        recurrent = replace(state.recurrent, episode=runs_of.runs.last_episode, memory=carry)
        state = memory(state, hidden, where)
        state = type(state)(state.hidden, state.index, recurrent=recurrent)
        start += length
    expected = STREAM[f"out_rope_{way}" if position else f"out_{way}"]
    close(torch.cat(outputs, dim=1), merged(expected))


@pytest.mark.parametrize("way", ["generate", "evaluate"])
def test_distances_are_counted_in_the_cache(way):
    """The positions of the authors' rotations are the indices of the kept keys."""
    keep = STREAM[f"out_keep_{way}"]
    memory = StreamingXL(RECENT - 1 + (way == "evaluate"), START)
    model = TransformerSpec(width=8, heads=2, memory=memory).build()
    where = TokenIndex.range(1, len(keep))
    (mask, *_) = model.memory_view(None, where).adapt_masks(model.attention_masks(where, where))
    place = keep.cumsum(dim=1) - 1
    expected = place.diagonal()[:, None] - place
    assert torch.equal(mask.distance[0][keep], expected[keep])


@pytest.mark.parametrize(
    "position",
    [
        RoPE(),
        XPos(scale_base=4.0),
        RoPE(scaling="dynamic", factor=4.0, original_length=4),
        ETCLabels(16, global_tokens=0),
    ],
    ids=["rope", "xpos", "dynamic", "labels"],
)
def test_weights_are_those_of_positions_in_the_cache(position):
    """The weights of a query are those of a sequence that consists of the kept keys and the query."""
    q, k = STREAM["in_q"], STREAM["in_k"]
    memory = StreamingXL(RECENT - 1, START)
    model = TransformerSpec(width=8, heads=2, memory=memory).build().double()
    where, module = TokenIndex.range(len(q), q.shape[2]), over_heads(q, position)
    for number, parameter in enumerate(module.position.parameters()):
        put(parameter, numbers(*parameter.shape, seed=number))
    (mask, *_) = model.memory_view(None, where).adapt_masks(model.attention_masks(where, where))
    weights = attention_weights(module, q, k, mask)
    for i in range(q.shape[2]):
        kept = STREAM["out_keep_generate"][i].nonzero()[:, 0]
        here = TokenIndex.range(len(q), len(kept))
        alone = AttentionMask(here.last(1), here, Full(), True, q.dtype)
        expected = attention_weights(module, q[:, :, i : i + 1], k[:, :, kept], alone)
        close(weights[:, :, i : i + 1, kept], expected)


def attention_weights(module: Attention, q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
    k = module.position.key(k, mask.key.position)
    q, bias = module.position.encode(q, k, q.shape[-1], mask, module.position.pass_table(mask))
    return module.kernel.weights(q, k, bias, mask)


def learned() -> Attention:
    heads, size = LEARNED["in_q"].shape[1], LEARNED["in_q"].shape[3]
    module = Attention(AttentionArguments(heads * size, heads, None, SinkSoftmax())).double()
    put(module.out.weight, torch.eye(heads * size, dtype=torch.float64))
    return module


def test_learned_logits():
    module = learned()
    put(module.kernel.sink, LEARNED["w_sink"])
    close(outputs_of(module), merged(LEARNED["out"]))


def test_learned_logits_of_zero():
    close(outputs_of(learned()), merged(LEARNED["out_zero_sink"]))


def test_learned_logits_without_any_key():
    module, keep = learned(), LEARNED["in_keep_empty_row"]
    put(module.kernel.sink, LEARNED["w_sink"])
    mask = causal_mask()
    mask.__dict__["allowed_by_head"] = keep[None, None].expand(len(LEARNED["in_q"]), 1, -1, -1)
    mask.__dict__["_self_visible"] = False
    mask.__dict__["sparse_plan"] = None
    close(outputs_of(module, mask), merged(LEARNED["out_empty_row"]))


def outputs_of(module: Attention, mask: AttentionMask | None = None) -> Tensor:
    q, k, v = (LEARNED[f"in_{name}"] for name in "qkv")
    return attend(module, q, k, v, mask or causal_mask())


def causal_mask() -> AttentionMask:
    q, k, memory = LEARNED["in_q"], LEARNED["in_k"], int(LEARNED["cfg_memory"])
    query = TokenIndex.range(len(q), q.shape[2], memory)
    return AttentionMask(query, TokenIndex.range(len(q), k.shape[2]), Full(), True, q.dtype)


def merged(x: Tensor) -> Tensor:
    """Concatenate heads: (B, H, T, D) -> (B, T, H D)."""
    return x.transpose(1, 2).flatten(2)
