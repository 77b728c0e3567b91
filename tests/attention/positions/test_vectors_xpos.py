"""XPos reproduces the authors' code, with memory, at any position of an episode."""

import pytest
import torch

from rlxf.attention import Full, TokenIndex, XPos
from rlxf.attention.attention_mask import AttentionMask
from tests.attention.oracle import close, load
from tests.attention.passes import after_memory, over_heads

VECTOR = load("xpos")
Q, K, V = (VECTOR[f"in_{name}"] for name in "qkv")


def attention():
    return over_heads(Q, XPos(scale_base=float(VECTOR["cfg_scale_base"])))


def test_scores_and_attention():
    module, mask = attention(), after_memory(Q, K)
    k = module.position.key(K, mask.key.position)
    q, bias = module.position.encode(Q, k, Q.shape[-1], mask, None)
    close(q @ k.transpose(-1, -2) + bias * Q.shape[-1] ** 0.5, VECTOR["out_scores"])
    close(module.average(Q, k, V, mask, None), VECTOR["out"])


@pytest.mark.parametrize("start", [10**3, 10**6])
def test_attention_does_not_depend_on_the_start(start):
    module, key = attention(), TokenIndex.range(len(K), K.shape[2], start)
    mask = AttentionMask(key.last(Q.shape[2]), key, Full(), True, torch.float64)
    k = module.position.key(K, key.position)
    close(module.average(Q, k, V, mask, None), VECTOR["out"], 1e-8)


def test_attention_over_long_passes_is_finite():
    q = torch.randn(1, 1, 1, 8)
    key = TokenIndex(torch.tensor([[0, 10**6, 0]]), torch.tensor([[0, 0, 1]]))
    module, k = over_heads(q, XPos()), torch.randn(1, 1, 3, 8)
    mask = AttentionMask(key.last(1), key, Full(), True, torch.float32)
    close(module.average(q, k, k, mask, None), k[:, :, 2:], 1e-6)
    mask = AttentionMask(key.at(slice(1, 2)), key, Full(), True, torch.float32)
    assert module.average(q, k, k, mask, None).isfinite().all()
