"""CoPE reproduces two public implementations, with memory, in any order of the keys."""

import torch

from rlxf.attention import CoPE, Full, TokenIndex
from rlxf.attention.attention_mask import AttentionMask
from tests.attention.oracle import close, load, put
from tests.attention.passes import after_memory, over_heads

VECTOR = load("cope")
Q, K, V = (VECTOR[f"in_{name}"] for name in "qkv")


def attention():
    module = over_heads(Q, CoPE(len(VECTOR["w_pos"])))
    put(module.position.vectors, VECTOR["w_pos"])
    return module


def test_bias_and_attention():
    module, mask = attention(), after_memory(Q, K)
    close(module.position.bias(Q, K, mask, None).where(mask.allowed[:, None], 0.0), VECTOR["out_add"])
    close(module.average(Q, K, V, mask, None), VECTOR["out"])


def test_order_of_keys_has_no_effect():
    """A ring buffer stores keys in another order, with keys of earlier episodes among them."""
    module, length = attention(), K.shape[2]
    order = torch.randperm(2 * length, generator=torch.Generator().manual_seed(0))
    key, other = TokenIndex.range(len(K), length), TokenIndex.range(len(K), length, start=3)
    keys = key.concatenate(TokenIndex(other.position, other.episode + 1))
    keys = TokenIndex(keys.position[:, order], keys.episode[:, order])
    mask = AttentionMask(key.last(Q.shape[2]), keys, Full(), True, Q.dtype)
    k, v = (torch.cat([x, 9 * x], dim=2)[:, :, order] for x in (K, V))
    close(module.average(Q, k, v, mask, None), VECTOR["out"])
