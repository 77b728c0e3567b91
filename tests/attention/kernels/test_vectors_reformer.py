"""LSH attention reproduces published code with chunks, and the paper's sum over rounds without."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention import LSH, Full, TokenIndex
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.attention_options import AttentionArguments
from rlxf.attention.kernels.lsh import LSHAttention, SharedQKAttention
from tests.attention.oracle import close, fill, load, put

VECTOR = load("reformer_lsh")
ROTATIONS = VECTOR["w_rotations"]
HEADS, SIZE, ROUNDS, HALF = ROTATIONS.shape
X = VECTOR["in_x"]


def attention(chunk: int | None) -> SharedQKAttention:
    """Return a module with the vector's weights; its output is the concatenation of the heads."""
    module = SharedQKAttention(
        AttentionArguments(HEADS * SIZE, HEADS, None, LSH(ROUNDS, 2 * HALF, chunk))
    ).double()
    put(module.kernel.rotations, ROTATIONS)
    fill(module.qkv, torch.cat([VECTOR["w_qk"].T, VECTOR["w_v"].T]))
    module.out = nn.Identity()
    return module


def mask(causal: bool) -> AttentionMask:
    index = TokenIndex.range(*X.shape[:2])
    return AttentionMask(index, index, Full(), causal, torch.float64, heads=HEADS)


def test_buckets():
    module = attention(None)
    q = module.split(module.qkv(X))[0]
    signed_buckets = module.kernel.projected_query_extras(q).long()
    buckets = torch.where(signed_buckets > 0, signed_buckets - 1, HALF - 1 - signed_buckets)
    expected = VECTOR["out_buckets_full"].transpose(2, 3) % (2 * HALF)
    assert torch.equal(buckets, expected)


def test_chunks():
    output = attention(int(VECTOR["cfg_chunk"]))(X, None, mask(causal=False))
    close(output, VECTOR["out_full"])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_whole_buckets_equal_the_papers_sum_over_rounds(causal):
    module = attention(None)
    q, v = module.split(module.qkv(X))
    assert isinstance(module.kernel, LSHAttention)
    buckets = module.kernel.projected_query_extras(q)
    expected = torch.zeros_like(q)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        expected[b, h, i] = attend(q[b, h], v[b, h], buckets[b, h], i, causal)
    close(module(X, None, mask(causal)), expected.transpose(1, 2).flatten(2))


def attend(q: Tensor, v: Tensor, buckets: Tensor, i: int, causal: bool) -> Tensor:
    """Attend from query i of q (T, D) by ``sum_r exp(z_r - z) o_r``.

    Each round has scores with ``- log N_ij``, and -1e5 for the query itself.
    """
    end = len(q) if not causal else i + 1
    k = F.rms_norm(q, (SIZE,), eps=1e-6) / SIZE**0.5
    logits, averages = [], []
    for r in range(ROUNDS):
        visible = [j for j in range(end) if buckets[j, r] == buckets[i, r]]
        shared = [(buckets[j] == buckets[i]).double().sum() for j in visible]
        scores = torch.stack(
            [(q[i] @ k[j] if j != i else -1e5) - n.log() for j, n in zip(visible, shared, strict=True)]
        )
        logits.append(scores.logsumexp(0))
        averages.append(scores.softmax(0) @ v[visible])
    return torch.stack(logits).softmax(0) @ torch.stack(averages)
