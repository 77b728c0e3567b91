"""The gates and the GTrXL block reproduce the paper, with DI-engine's weights."""

import pytest
import torch
from torch import Tensor

from rlxf.attention import (
    XL,
    AddReLU,
    GRUGate,
    HighwayGate,
    InputGate,
    OutputGate,
    SigTanhGate,
    State,
    TokenIndex,
    Transformer,
    TransformerSpec,
    Window,
    XLRelative,
)
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.layers import Block
from rlxf.attention.residuals.base import Gate
from rlxf.attention.residuals.gates import GRUGateModule
from tests.attention.oracle import close, fill, load, named, put

VECTOR, TRXL_I = load("gtrxl"), load("trxl_relu")
X, Y = VECTOR["in_gate_x"], VECTOR["in_gate_y"]
WIDTH = X.shape[-1]


def load_gru(gate: GRUGateModule, name: str) -> None:
    matrix = {part: named(VECTOR, f"{name}.{part}.")[0] for part in ("Wr", "Ur", "Wz", "Uz", "Wg", "Ug")}
    put(gate.w, torch.cat([matrix["Wr"], matrix["Wz"], matrix["Wg"]]))
    put(gate.u, torch.cat([matrix["Ur"], matrix["Uz"]]))
    put(gate.u_g, matrix["Ug"])
    put(gate.b, VECTOR[f"w_{name}__bg_T_out_in"])


def test_gru_gate():
    gate = GRUGate().build(WIDTH, 1).double()
    load_gru(gate, "gate1")
    close(gate.gate(X, Y), VECTOR["out_gru_gate"])


@pytest.mark.parametrize(
    ("technique", "matrices", "out"),
    [
        (InputGate, ["w_Wg_in"], "out_gate_input"),
        (OutputGate, ["w_Wg_out"], "out_gate_output"),
        (HighwayGate, ["w_Wg_hw"], "out_gate_highway"),
        (SigTanhGate, ["w_Wg_st", "w_Ug_st"], "out_gate_sigtanh"),
    ],
)
def test_other_gates(technique, matrices, out):
    gate: Gate = technique().build(WIDTH, 1).double()
    put(gate.w, torch.cat([VECTOR[name].T for name in matrices]))
    if technique is not InputGate:
        put(gate.b, VECTOR["w_bg"].expand(WIDTH))
    close(gate.gate(X, Y), VECTOR[out])


def load_attention(block: Block) -> None:
    """Load attention weights without the bias of the distance projection.

    It would add the same number to all scores of a query, which softmax cancels.
    """
    parts = [named(VECTOR, f"attention.attention_{part}.0.") for part in ("q", "kv")]
    attention = block.attention
    fill(attention.qkv, *(torch.cat(both) for both in zip(*parts, strict=True)))
    fill(attention.out, *named(VECTOR, "attention.project.0."))
    fill(attention.position.r, named(VECTOR, "attention.project_pos.0.")[0])
    put(attention.position.u, VECTOR["w_u"])
    put(attention.position.v, VECTOR["w_v"])


def block_output() -> Tensor:
    x, memory = VECTOR["in_x"].transpose(0, 1), VECTOR["in_mem"].transpose(0, 1)
    inner = VECTOR["w_mlp__0__0__weight_T_out_in"].shape[0]
    shape = {"width": x.shape[-1], "heads": VECTOR["w_u"].shape[0], "feed_forward": inner}
    block = TransformerSpec(position=XLRelative(), residual=GRUGate(), **shape).build().double().blocks[0]
    load_attention(block)
    load_gru(block.attention_norm.residual, "gate1")
    load_gru(block.feed_forward_norm.residual, "gate2")
    fill(block.attention_norm.norm, *named(VECTOR, "layernorm1."))
    fill(block.feed_forward_norm.norm, *named(VECTOR, "layernorm2."))
    fill(block.feed_forward.inner, *named(VECTOR, "mlp.0.0."))
    fill(block.feed_forward.outer, *named(VECTOR, "mlp.2.0."))
    key = TokenIndex.range(x.shape[0], memory.shape[1] + x.shape[1])
    mask = AttentionMask(key.last(x.shape[1]), key, TransformerSpec().pattern, True, x.dtype)
    return block.apply_feed_forward(block.attend(x, memory, mask)).transpose(0, 1)


def test_block_reproduces_the_paper():
    close(block_output(), VECTOR["out_formula_paper"])


def test_block_normalizes_queries_unlike_di_engine():
    assert (block_output() - VECTOR["out"]).abs().max() > 1e-3


# TrXL-I: a ReLU before a plain residual connection.


def trxl_i() -> Transformer:
    """Return a transformer of the vector's layer, with its weights."""
    width, memory = TRXL_I["in_x"].shape[-1], len(TRXL_I["in_memory"])
    spec = TransformerSpec(
        width=width,
        heads=len(TRXL_I["w_u"]),
        layers=1,
        feed_forward=len(TRXL_I["w_fc1_bias"]),
        position=XLRelative(),
        pattern=Window(memory + len(TRXL_I["in_x"])),
        memory=XL(memory),
        residual=AddReLU(),
        final_norm=False,
    )
    model = spec.build().double()
    block: Block = model.blocks[0]
    attention = block.attention
    fill(attention.qkv, torch.cat([TRXL_I[f"w_{part}"].T for part in "qkv"]))
    fill(attention.out, TRXL_I["w_o"].T)
    fill(attention.position.r, TRXL_I["w_r"].T)
    put(attention.position.u, TRXL_I["w_u"])
    put(attention.position.v, TRXL_I["w_vbias"])
    fill(block.attention_norm.norm, TRXL_I["w_ln1"], TRXL_I["w_ln1_bias"])
    fill(block.feed_forward_norm.norm, TRXL_I["w_ln2"], TRXL_I["w_ln2_bias"])
    fill(block.feed_forward.inner, TRXL_I["w_fc1"].T, TRXL_I["w_fc1_bias"])
    fill(block.feed_forward.outer, TRXL_I["w_fc2"].T, TRXL_I["w_fc2_bias"])
    return model


def trxl_i_inputs() -> tuple[Tensor, TokenIndex, State]:
    """Return the segment, its index and the memory before it."""
    x, memory = TRXL_I["in_x"].transpose(0, 1), TRXL_I["in_memory"].transpose(0, 1)
    index = TokenIndex.range(len(x), memory.shape[1] + x.shape[1])
    return x, index.last(x.shape[1]), State(memory[None], index.at(slice(memory.shape[1])))


def test_trxl_i():
    x, index, state = trxl_i_inputs()
    close(trxl_i().outputs(x, index, state), TRXL_I["out"].transpose(0, 1))


def test_trxl_i_acting():
    model, (x, index, state) = trxl_i(), trxl_i_inputs()
    cache = model.cache(state, state.index.shape[1] + x.shape[1])
    steps = [model.step(x[:, t], index.at(slice(t, t + 1)), cache)[0] for t in range(x.shape[1])]
    close(torch.stack(steps), TRXL_I["out"])
