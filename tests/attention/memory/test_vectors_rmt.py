"""Memory tokens against the authors' code: RMT around GPT-2, and RATE with its retention valve."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from rlxf.attention import RATE, RMT, LearnedAbsolute, TokenIndex, Transformer, TransformerSpec, XLRelative
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.layers import Block
from rlxf.attention.memory.rmt import RetentionValve
from rlxf.attention.positions.xl_relative import XLRelativeBias
from tests.attention.oracle import close, fill, load, put
from tests.attention.passes import act
from tests.attention.worlds import Segment

GPT2, PLAIN = load("rmt"), load("rate")
WAYS = pytest.mark.parametrize(("way", "mask"), [("", "causal"), ("groups_", "mutual")])
CUTS = pytest.mark.parametrize("cuts", [[12], [4, 4, 4], [3, 2, 7], [1] * 12], ids=str)


def weight(name: str) -> Tensor:
    return GPT2[f"w_gpt2_{name}"]


def missing_biases(core: Transformer) -> Tensor:
    """Return the biases of q, k and v of all layers, concatenated, which the file lacks.

    They are recovered from the outputs of the first segment in the causal form by the Gauss-Newton method.
    All other outputs, those of later segments and of the other mask, are not used.
    """
    words, length = weight("wte.weight"), int(GPT2["cfg_segment"])
    x, target = words[GPT2["in_ids"][:, :length]], GPT2["out_logits"][:, :length]

    @torch.no_grad()
    def error(biases: Tensor) -> Tensor:
        put_biases(core, biases)
        return (core(x, TokenIndex.range(len(x), length))[0] @ words.T - target).flatten()

    return solve(error, torch.zeros(sum(len(block.attention.qkv.bias) for block in core.blocks)).double())


def solve(error: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Minimize ``|error(x)|^2`` by damped Gauss-Newton steps with a numerical Jacobian."""
    x, now, damping, steps = start, error(start), 1e-2, 1e-6 * torch.eye(len(start)).double()
    for _ in range(40):
        jacobian = torch.stack([(error(x + d) - error(x - d)) / 2e-6 for d in steps], dim=1)
        damped = jacobian.T @ jacobian + damping * torch.eye(len(x)).double()
        change = -torch.linalg.solve(damped, jacobian.T @ now)
        after = error(x + change)
        better = after.norm() < now.norm()
        x, now = (x + change, after) if better else (x, now)
        damping = max(damping / 10, 1e-14) if better else damping * 10
        if now.abs().max() < 1e-13:
            break
    return x


def put_biases(core: Transformer, biases: Tensor) -> None:
    for block, bias in zip(core.blocks, biases.chunk(len(core.blocks)), strict=True):
        put(block.attention.qkv.bias, bias)


@cache
def biases() -> Tensor:
    return missing_biases(without_biases("causal"))


def rmt(mask: str) -> Transformer:
    core = without_biases(mask)
    put_biases(core, biases())
    return core


def without_biases(mask: str) -> Transformer:
    count, width = GPT2["w_memory"].shape
    spec = TransformerSpec(
        width=width,
        layers=int(GPT2["cfg_layers"]),
        heads=int(GPT2["cfg_heads"]),
        position=LearnedAbsolute(len(weight("wpe.weight"))),
        memory=RMT(int(GPT2["cfg_segment"]), count, mask),
        activation="gelu_tanh",
    )
    core = spec.build().double()
    put(core.memory_tokens.start, GPT2["w_memory"])
    put(core.embedding.weight, weight("wpe.weight"))
    for number, block in enumerate(core.blocks):
        fill_gpt2(block, f"h.{number}")
    fill(core.norm, weight("ln_f.weight"), weight("ln_f.bias"))
    return core


def fill_gpt2(block: Block, layer: str) -> None:
    modules = {
        "ln_1": block.attention_norm.norm,
        "ln_2": block.feed_forward_norm.norm,
        "attn.c_attn": block.attention.qkv,
        "attn.c_proj": block.attention.out,
        "mlp.c_fc": block.feed_forward.inner,
        "mlp.c_proj": block.feed_forward.outer,
    }
    for name, module in modules.items():
        value = weight(f"{layer}.{name}.weight")
        bias = None if name == "attn.c_attn" else weight(f"{layer}.{name}.bias")
        fill(module, value.T if value.dim() == 2 else value, bias)


@WAYS
@CUTS
def test_rmt_in_segments_of_any_length(way, mask, cuts):
    words, ids = weight("wte.weight"), GPT2["in_ids"]
    outputs, memories = learned(rmt(mask), words[ids], cuts)
    close(outputs @ words.T, GPT2[f"out_{way}logits"])
    for end, memory in memories.items():
        close(memory, GPT2[f"out_{way}memory"][end // int(GPT2["cfg_segment"]) - 1])


@WAYS
def test_rmt_step_by_step(way, mask):
    words, ids = weight("wte.weight"), GPT2["in_ids"]
    outputs, memory = acted(rmt(mask), words[ids])
    close(outputs @ words.T, GPT2[f"out_{way}logits"])
    close(memory, GPT2[f"out_{way}memory"][-1])


def learned(core: Transformer, x: Tensor, cuts: list[int]) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the outputs, and the memory after each segment that ends where a cut is."""
    outputs, memories, state, start = [], {}, None, 0
    for length in cuts:
        where = TokenIndex.range(len(x), length, start)
        y, state = core(x[:, start : start + length], where, state)
        outputs.append(y)
        start += length
        if start % core.memory.segment_length == 0:
            memories[start] = state.recurrent.memory["tokens"]
    return torch.cat(outputs, dim=1), memories


def acted(core: Transformer, x: Tensor) -> tuple[Tensor, Tensor]:
    cache = core.cache(core.initial_state(len(x)), core.memory.length + 1)
    run = Segment(x, TokenIndex.range(*x.shape[:2]), None)
    return act(core, run, cache)[0], cache.recurrent.memory["tokens"]


def linear(name: str) -> tuple[Tensor, Tensor | None]:
    return PLAIN[f"w_{name}.weight"], PLAIN.get(f"w_{name}.bias")


def rate(count: int | None = None, valve: bool = True) -> Transformer:
    """Build the reference's layer with a single residual: ``LN(x + attention)``.

    ``count`` is the number of memory tokens, the first ones; None for all.
    """
    tokens, width = PLAIN["w_mem_tokens"][:count, 0], PLAIN["w_mem_tokens"].shape[-1]
    layer, segment = "layers.0", 3 * int(PLAIN["cfg_steps"])
    with_valve = RATE(segment, len(tokens), valve_heads=int(PLAIN["cfg_valve_heads"]))
    spec = TransformerSpec(
        width=width,
        layers=1,
        heads=int(PLAIN["cfg_heads"]),
        feed_forward=len(PLAIN[f"w_{layer}.pos_ff.CoreNet.0.bias"]),
        position=XLRelative(),
        memory=with_valve if valve else RMT(segment, len(tokens), "mutual"),
        norm="post",
        final_norm=False,
    )
    core = spec.build().double()
    put(core.memory_tokens.start, tokens)
    if valve:
        fill_valve(core.memory_tokens)
    (block,) = core.blocks
    attention = block.attention
    fill(attention.qkv, *linear(f"{layer}.dec_attn.qkv_net"))
    fill(attention.out, *linear(f"{layer}.dec_attn.o_net"))
    put(attention.position.r.weight, PLAIN[f"w_{layer}.dec_attn.r_net.weight"])
    put(attention.position.u, PLAIN["w_r_w_bias"])
    put(attention.position.v, PLAIN["w_r_r_bias"])
    fill(block.attention_norm.norm, *linear(f"{layer}.layer_norm1"))
    fill(block.feed_forward_norm.norm, *linear(f"{layer}.layer_norm2"))
    fill(block.feed_forward.inner, *linear(f"{layer}.pos_ff.CoreNet.0"))
    fill(block.feed_forward.outer, *linear(f"{layer}.pos_ff.CoreNet.3"))
    return core


def fill_valve(valve: RetentionValve) -> None:
    for module, name in ((valve.query, "wq"), (valve.key, "wk"), (valve.value, "wv"), (valve.out, "dense")):
        fill(module, *linear(f"mha_mem_to_mem.{name}"))


def rate_tokens() -> Tensor:
    """Return the tokens return-to-go, state, action of all steps, (B, 3 K, C)."""
    names = {"ret_emb": "in_rtg", "state_encoder": "in_states", "action_embeddings": "in_actions"}
    parts = [torch.nn.functional.linear(PLAIN[value], *linear(name)) for name, value in names.items()]
    return torch.stack(parts, dim=2).flatten(1, 2)


@CUTS
def test_rate_in_segments_of_any_length(cuts):
    x, step = rate_tokens(), 3
    outputs, memories = learned(rate(), x, [step * length for length in cuts])
    close(actions(outputs), PLAIN["out_plain_logits"])
    for end, memory in memories.items():
        expected = PLAIN["out_plain_memory"][end // (step * int(PLAIN["cfg_steps"])) - 1]
        close(memory, expected.transpose(0, 1))


def test_rate_step_by_step():
    outputs, memory = acted(rate(), rate_tokens())
    close(actions(outputs), PLAIN["out_plain_logits"])
    close(memory, PLAIN["out_plain_memory"][-1].transpose(0, 1))


def actions(outputs: Tensor) -> Tensor:
    return torch.nn.functional.linear(outputs[:, 1::3], *linear("head.0")).tanh()


def double_residual(core: Transformer) -> Transformer:
    """Turn ``LN(x + attention)`` into ``LN(2 x + attention)`` of the reference: a norm ignores the scale."""
    (block,) = core.blocks
    norm = block.attention_norm.norm
    with torch.no_grad():
        block.attention.out.weight /= 2
    norm.eps /= 4
    return core


@CUTS
def test_rate_with_one_token_in_segments_of_any_length(cuts):
    """One memory token has no keys above the diagonal, where the reference's relative shift is wrong."""
    outputs, memories = learned(double_residual(rate(1)), rate_tokens(), [3 * length for length in cuts])
    close(actions(outputs), PLAIN["out_one_logits"])
    for end, memory in memories.items():
        expected = PLAIN["out_one_memory"][end // (3 * int(PLAIN["cfg_steps"])) - 1]
        close(memory, expected.transpose(0, 1))


def test_rate_with_one_token_step_by_step():
    outputs, memory = acted(double_residual(rate(1)), rate_tokens())
    close(actions(outputs), PLAIN["out_one_logits"])
    close(memory, PLAIN["out_one_memory"][-1].transpose(0, 1))


def foreign_terms(
    self: XLRelativeBias, q: Tensor, k: Tensor, mask: AttentionMask, table: Tensor | None
) -> Tensor:
    """Return the bias of the reference, whose relative shift is wrong above the diagonal.

    There, j > i + 1 has the term of query i + 1 with distance n + 1 - (j - i), and j = i + 1 has none.
    """
    size = k.shape[2]
    r = self.table(torch.arange(size + 1), None)
    terms = torch.einsum("bhid,hdr->bhir", q + self.v[:, None], r)
    terms = torch.cat([terms, terms[:, :, :1]], dim=2)  # never read: query n has no j > n + 1
    i, j = torch.arange(size)[:, None], torch.arange(size)
    above = j > i + 1
    bias = terms[:, :, torch.where(above, i + 1, i), torch.where(above, size + 1 - (j - i), i - j)]
    return bias.masked_fill(j == i + 1, 0.0)


@pytest.mark.parametrize(("valve", "name"), [(True, "out_memory"), (False, "out_memory_no_valve")])
def test_rate_with_the_relative_shift_of_the_reference(valve, name, monkeypatch):
    monkeypatch.setattr(XLRelativeBias, "bias", foreign_terms)
    cuts = [3 * int(PLAIN["cfg_steps"])] * (PLAIN["in_rtg"].shape[1] // int(PLAIN["cfg_steps"]))
    outputs, memories = learned(double_residual(rate(valve=valve)), rate_tokens(), cuts)
    close(torch.stack(list(memories.values())), PLAIN[name].transpose(1, 2))
    if valve:
        close(actions(outputs), PLAIN["out_logits"])


def test_retention_valve():
    width = PLAIN["in_valve_old"].shape[-1]
    valve = RetentionValve(RATE(2, 3, valve_heads=int(PLAIN["cfg_valve_heads"])), width).double()
    fill_valve(valve)
    close(valve.update(PLAIN["in_valve_old"], PLAIN["in_valve_new"]), PLAIN["out_valve"])
