"""FIRE reproduces two public implementations, with memory."""

from rlxf.attention import FIRE
from tests.attention.oracle import close, fill, load, put
from tests.attention.passes import after_memory, over_heads

VECTOR = load("fire")


def test_bias_and_attention():
    q, k, v = (VECTOR[f"in_{name}"] for name in "qkv")
    position = FIRE(len(VECTOR["w_b1"]), float(VECTOR["cfg_init_L"]))
    attention, mask = over_heads(q, position), after_memory(q, k)
    learned = attention.position
    fill(learned.inner, VECTOR["w_1"].T, VECTOR["w_b1"])
    fill(learned.outer, VECTOR["w_2"].T, VECTOR["w_b2"])
    put(learned.c, VECTOR["w_c"])
    put(learned.scale, VECTOR["w_L_multiplier"])
    close(learned.bias(q, k, mask, None).where(mask.allowed[:, None], 0.0)[0], VECTOR["out_bias"])
    close(attention.average(q, k, v, mask, None), VECTOR["out"])
