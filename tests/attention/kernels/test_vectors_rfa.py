"""RFA reproduces the paper's formulas, with and without gate, and the authors' features."""

import torch
from torch import Tensor

from rlxf.attention import RFA, Full, TokenIndex
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.rfa import GatedRFAAttention, RFAAttention
from tests.attention.oracle import close, fill, load, put

VECTOR = load("rfa")
HEADS, DRAWS, SIZE = VECTOR["w_random"].shape
AUTHORS_SCALE, AUTHORS_LENGTH = 0.1, 1e-3
"""Factor in place of D^-1/2, and the authors' constant added to the length of a query or key."""


def heads(x: Tensor) -> Tensor:
    """Transpose (T, B, H, D) of the vector to (B, H, T, D)."""
    return x.permute(1, 2, 0, 3)


def causal_relation(length: int, batch: int) -> AttentionMask:
    index = TokenIndex.range(batch, length)
    return AttentionMask(index, index, Full(), True, torch.float64)


def kernel(gate: bool = False) -> RFAAttention:
    module = RFA(DRAWS, fixed=True, gate=gate).build(HEADS * SIZE, HEADS).double()
    put(module.waves, VECTOR["w_random"])
    return module


def test_causal_average():
    q, k, v = (heads(VECTOR[f"in_{name}"]) for name in "qkv")
    y = kernel()(q, k, v, None, causal_relation(q.shape[2], q.shape[0]))
    close(y.permute(2, 0, 1, 3).flatten(2), VECTOR["out_paper_causal"])


def test_gated_recurrence():
    """Queries are used as the gate's input tokens, and the gate of a head reads only its own features."""
    q, k, v = (heads(VECTOR[f"in_{name}"]) for name in "qkv")
    module = kernel(gate=True)
    assert isinstance(module, GatedRFAAttention)
    fill(module.gate, torch.block_diag(*VECTOR["w_gate"]), VECTOR["w_gate_b"])
    gate_logits = module.key_extras(q.transpose(1, 2).flatten(2))
    mask = causal_relation(q.shape[2], q.shape[0])
    y = module(*module.transform_in_context(q, torch.cat([k, gate_logits], dim=-1), mask), v, None, mask)
    close(y.permute(2, 0, 1, 3), VECTOR["out_formula_gated"])


def test_features_equal_the_authors_up_to_scale():
    """Each token is a separate head, with lower frequencies where the authors add to its length."""
    for name in "qk":
        x = VECTOR[f"in_{name}"].reshape(-1, SIZE)
        length = x.norm(dim=-1)[:, None, None]
        module = RFA(DRAWS, fixed=True).build(x.numel(), len(x)).double()
        put(module.waves, VECTOR["w_random"].repeat(len(x) // HEADS, 1, 1))
        put(module.frequency, (length / (length + AUTHORS_LENGTH)).expand_as(module.frequency))
        phi = module.query_features(x[None, :, None]).view_as(VECTOR[f"out_phi_{name}"])
        close(phi * AUTHORS_SCALE * DRAWS**0.5, VECTOR[f"out_phi_{name}"])
