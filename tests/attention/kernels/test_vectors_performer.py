"""Performer reproduces the paper's estimator for a given projection."""

import torch

from rlxf.attention import Full, Performer, TokenIndex
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.performer import PerformerAttention
from tests.attention.oracle import close, load, put

VECTOR = load("performer")
FEATURES, SIZE = VECTOR["w_projection"].shape
Q, K, V = (VECTOR[f"in_{name}"] for name in "qkv")


def kernel(kind: str = "exp") -> PerformerAttention:
    heads = Q.shape[1]
    module = Performer(FEATURES, kind).build(heads * SIZE, heads).double()
    put(module.projection, VECTOR["w_projection"])
    return module


def average(causal: bool) -> torch.Tensor:
    index = TokenIndex.range(Q.shape[0], Q.shape[2])
    return kernel()(Q, K, V, None, AttentionMask(index, index, Full(), causal, torch.float64))


def exact(x: torch.Tensor) -> torch.Tensor:
    """Return phi of one query or key (D,), as in the paper."""
    x = x / SIZE**0.25
    return (VECTOR["w_projection"] @ x - x @ x / 2).exp() / FEATURES**0.5


def test_bidirectional():
    close(average(causal=False), VECTOR["out_exact_noncausal"])


def test_causal():
    expected = torch.zeros_like(V)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, Q.shape[:3])).tolist():
        weights = torch.stack([exact(Q[b, h, i]) @ exact(K[b, h, j]) for j in range(i + 1)])
        expected[b, h, i] = weights @ V[b, h, : i + 1] / weights.sum()
    close(average(causal=True), expected)


def test_rectified_features():
    close(kernel("relu").query_features(Q), VECTOR["out_relu_feat_q"])
