"""Shaw's relative positions reproduce tensor2tensor, in keys and in values."""

import pytest

from rlxf.attention import Full, ShawRelative, TokenIndex
from rlxf.attention.attention_mask import AttentionMask
from tests.attention.oracle import close, load, put
from tests.attention.passes import attend, over_heads

VECTOR = load("shaw_relative")
SINGLE = 1e-5  # The authors compute in float32.


@pytest.mark.parametrize(("causal", "out"), [(False, "out"), (True, "out_causal")])
def test_attention(causal, out):
    q, k, v = (VECTOR[f"in_{name}"].double() for name in "qkv")
    attention = over_heads(q, ShawRelative(int(VECTOR["cfg_max_relative"])))
    put(attention.position.key_table, VECTOR["w_rel_k"])
    put(attention.position.value_table, VECTOR["w_rel_v"])
    index = TokenIndex.range(q.shape[0], q.shape[2])
    mask = AttentionMask(index, index, Full(), causal, q.dtype)
    table = attention.position.table(mask.relative.distances, None)
    y = attend(attention, q, k, v, mask, table)
    close(y, VECTOR[out].double().transpose(1, 2).flatten(2), SINGLE)
