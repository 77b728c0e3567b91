"""KERPLE reproduces the authors' code, for both forms, with memory."""

import pytest

from rlxf.attention import KERPLE
from rlxf.attention.positions.kerple import inverse_softplus
from tests.attention.oracle import close, load, put
from tests.attention.passes import after_memory, over_heads

VECTOR = load("kerple")


@pytest.mark.parametrize("form", ["log", "power"])
def test_bias_and_attention(form):
    q, k, v = (VECTOR[f"in_{name}"] for name in "qkv")
    attention, mask = over_heads(q, KERPLE(form)), after_memory(q, k)
    a, p = VECTOR[f"w_{form}_a"], VECTOR[f"w_{form}_p"]
    put(attention.position.first, inverse_softplus(p if form == "log" else a))
    put(attention.position.second, inverse_softplus(a) if form == "log" else (p / 2).logit())
    table = attention.position.pass_table(mask)
    bias = attention.position.bias(q, k, mask, table)
    close(bias.where(mask.allowed[:, None], 0.0)[0], VECTOR[f"out_bias_{form}"])
    close(attention.average(q, k, v, mask, table), VECTOR[f"out_{form}"])
