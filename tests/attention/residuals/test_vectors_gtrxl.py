"""The gates and the GTrXL block reproduce the paper, with DI-engine's weights."""

import pytest
import torch
from torch import Tensor

from rlxf.attention import (
    GRUGate,
    HighwayGate,
    InputGate,
    OutputGate,
    SigTanhGate,
    TokenIndex,
    TransformerSpec,
    XLRelative,
)
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.layers import Block
from rlxf.attention.residuals.base import Gate
from rlxf.attention.residuals.gates import GRU
from tests.attention.oracle import close, fill, load, named, put

VECTOR = load("gtrxl")
X, Y = VECTOR["in_gate_x"], VECTOR["in_gate_y"]
WIDTH = X.shape[-1]


def load_gru(gate: GRU, name: str) -> None:
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
