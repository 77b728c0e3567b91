"""Adaptive and dynamic spans reproduce the paper's formulas and penalties."""

import torch

from rlxf.attention import AdaptiveSpan, TokenIndex, Window
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.span import AdaptiveSpanAttention, DynamicSpan, DynamicSpanAttention
from tests.attention.oracle import close, fill, load, put

VECTOR = load("adaptive_span")
LIMIT, RAMP, Z = int(VECTOR["cfg_span"]), int(VECTOR["cfg_ramp"]), VECTOR["cfg_z"]


def kernel(penalty: float = 0.0, include_self: bool = True) -> AdaptiveSpanAttention:
    heads = len(Z)
    module = (
        AdaptiveSpan(LIMIT, RAMP, penalty=penalty, include_self=include_self).build(4 * heads, heads).double()
    )
    put(module.span, Z / LIMIT)
    return module


def test_attention_with_positions_in_keys():
    """The authors' queries see the S tokens before them, the range of the vector's position table."""
    q, k, v = (VECTOR[f"in_{name}"][None] for name in "qkv")
    queries, keys = q.shape[2], k.shape[2]
    index = TokenIndex.range(1, keys)
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    by_distance = (q @ VECTOR["w_key_pe"]) / q.shape[-1] ** 0.5
    bias = by_distance.gather(-1, (LIMIT - distance).clamp(0, LIMIT - 1).expand(*q.shape[:2], -1, -1))
    mask = AttentionMask(index.last(queries), index, Window(LIMIT + 1), True, torch.float64)
    close(kernel(include_self=False)(q, k, v, bias, mask), VECTOR["out_formula_paper"][None], 1e-7)


def test_weights_by_distance():
    """With equal scores, weights are m_z(distance) over their sum."""
    table = VECTOR["out_mask_table"]
    heads, length = table.shape
    zeros = torch.zeros(1, heads, length, 4, dtype=torch.float64)
    index = TokenIndex.range(1, length)
    mask = AttentionMask(index, index, Window(length), True, torch.float64)
    weights = kernel().weights(zeros, zeros, None, mask)[0, :, -1]
    close(weights.flip(-1), table / table.sum(-1, keepdim=True))


def test_penalty():
    close(kernel(float(VECTOR["cfg_loss_coeff"])).penalty(), VECTOR["out_span_loss"])


def test_reach_is_the_largest_span_plus_the_ramp():
    module = kernel()
    assert module.max_distance == int(Z.max()) + RAMP


def dynamic(penalty: float = 1.0) -> DynamicSpanAttention:
    v, b = VECTOR["w_dyn_v"], VECTOR["w_dyn_b"]
    module = DynamicSpan(LIMIT, RAMP, penalty).build(v.shape[1], v.shape[0]).double()
    fill(module.span, v, b)
    return module


def test_dynamic_spans():
    z = dynamic().query_extras(VECTOR["in_dyn_x"][None])
    close(z[0, ..., 0].T, VECTOR["out_formula_dynamic_z"])


def test_dynamic_penalty_ignores_empty_slots_and_is_returned_once():
    module, expected = dynamic(0.5), VECTOR["out_formula_dynamic_z"]
    q = module.query_extras(VECTOR["in_dyn_x"][None])
    index = TokenIndex.range(1, q.shape[2])
    filled = TokenIndex(index.position, torch.where(index.position < 4, 0, -1))
    mask = AttentionMask(filled, filled, Window(3), True, torch.float64)
    module.transform_in_context(q, q, mask)
    close(module.penalty(), 0.5 * expected[:4].mean())
    assert module.penalty() is None
