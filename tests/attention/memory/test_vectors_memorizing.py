"""kNN memory reproduces the formula of the Memorizing Transformer's authors."""

import torch
from torch import Tensor

from rlxf.attention import KNN, Full, Softmax, TokenIndex
from rlxf.attention.attention_options import AttentionArguments
from rlxf.attention.memory.knn_attention import KNNAttention, KNNMask, search_torch
from tests.attention.oracle import close, fill, load, put

VECTOR = load("memorizing")
X, KEYS, VALUES = VECTOR["in_x"], VECTOR["in_mem_k"], VECTOR["in_mem_v"]
BATCH, HEADS, LENGTH, SIZE = VECTOR["out_mem"].shape
TOP = VECTOR["in_top_idx"].shape[-1]
FAR = KEYS.shape[1]


def attention(gate: Tensor) -> KNNAttention:
    """Return a module with the vector's weights; its output is the concatenation of the heads."""
    module = KNNAttention(AttentionArguments(HEADS * SIZE, HEADS, None, Softmax()), top=TOP).double()
    put(module.log_scale, VECTOR["w_scale"])
    put(module.gate, gate)
    fill(module.out, torch.eye(HEADS * SIZE, dtype=X.dtype))
    return module


def relation() -> KNNMask:
    """Return a mask in which all of memory is far, and segment tokens see earlier ones."""
    memory = KNN(LENGTH, FAR + LENGTH, TOP)
    far, near = TokenIndex.range(BATCH, FAR), TokenIndex.range(BATCH, LENGTH, start=FAR + LENGTH)
    return KNNMask(near, near, Full(), True, X.dtype, heads=HEADS, is_far=memory.is_far, far=far)


def by_head(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, SIZE)).transpose(1, 2).expand(-1, HEADS, -1, -1)


def heads_output(gate: Tensor) -> Tensor:
    """Return the output of each head, (B, H, T, D); all heads share the package's single key and value."""
    module, seen = attention(gate), relation()
    q = module._with_query_extras(by_head(X @ VECTOR["w_q"]), X)
    k, v = (by_head(part) for part in (X @ VECTOR["w_kv"]).chunk(2, dim=-1))
    k, v = module.prepare_keys((k, v), seen.key.position)
    far = module.far((by_head(KEYS), by_head(VALUES)))
    return module._add_far(q, module.segment_average(q, k, v, seen), far, seen).detach()


def test_gated_combination_of_local_and_memory_attention():
    close(heads_output(VECTOR["w_gate"]), VECTOR["out_formula_paper_heads"])


def test_local_and_memory_attention_separately():
    large = torch.full_like(VECTOR["w_gate"], 100.0)
    close(heads_output(-large), VECTOR["out_local"])
    close(heads_output(large), VECTOR["out_mem"])


def test_nearest_keys_are_selected():
    module = attention(VECTOR["w_gate"])
    q = module._with_query_extras(by_head(X @ VECTOR["w_q"]), X)
    chosen = search_torch(q, module.far((by_head(KEYS), by_head(VALUES)))[0], relation().far_mask(), TOP)
    assert torch.equal(chosen.sort().values, VECTOR["in_top_idx"].sort().values)
