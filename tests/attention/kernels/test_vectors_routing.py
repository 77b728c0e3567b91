"""Routing reproduces published code with clusters of equal size, and the paper's S_i without."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention import Full, Routing, TokenIndex
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.routing import RoutingAttention
from rlxf.attention.token_index import EMPTY
from tests.attention.oracle import close, load, put

VECTOR = load("routing")
Q, K, V = (VECTOR[f"in_{name}"] for name in "qkv")
MEANS, WINDOW = VECTOR["w_means"], int(VECTOR["cfg_window"])
HEADS, CLUSTERS, SIZE = MEANS.shape
INDEX = TokenIndex.range(Q.shape[0], Q.shape[2])


def kernel(window: int | None = WINDOW, **options: float) -> RoutingAttention:
    module = Routing(CLUSTERS, window, **options).build(HEADS * SIZE, HEADS).double()
    put(module.centroids, MEANS)
    return module


def relation(index: TokenIndex = INDEX, causal: bool = False) -> AttentionMask:
    return AttentionMask(index, index, Full(), causal, torch.float64, heads=HEADS)


def attend(module: RoutingAttention, mask: AttentionMask, q: Tensor = Q, k: Tensor = K) -> Tensor:
    """Call the kernel as `Attention` does."""
    queries = torch.cat([q, module.projected_query_extras(q)], dim=-1)
    keys = torch.cat([k, module.projected_key_extras(k)], dim=-1)
    return module(*module.transform_in_context(queries, keys, mask), V, None, mask)


def test_clusters_of_even_size():
    """In published code the mean over c clusters is the sum divided by c + 1e-5."""
    times = VECTOR["out_times_routed_full"][..., None]
    close(attend(kernel(), relation()), VECTOR["out_full"] * (times + 1e-5) / times.clamp(min=1))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_clusters_of_any_size(causal):
    expected = torch.zeros_like(Q)
    cluster = [(F.normalize(x, dim=-1) @ MEANS.transpose(1, 2)).argmax(-1) for x in (Q, K)]
    for b, h, i in torch.cartesian_prod(*map(torch.arange, Q.shape[:3])).tolist():
        end = i + 1 if causal else Q.shape[2]
        visible = [j for j in range(end) if cluster[1][b, h, j] == cluster[0][b, h, i]]
        if visible:
            scores = K[b, h, visible] @ Q[b, h, i] / SIZE**0.5
            expected[b, h, i] = scores.softmax(0) @ V[b, h, visible]
    close(attend(kernel(window=None), relation(causal=causal)), expected)


def test_commitment_loss():
    module = kernel(commitment=1e-4)
    attend(module, relation())
    close(module.penalty(), VECTOR["out_aux_full"][0])
    assert module.penalty() is None


def test_centroids_move_only_at_updates():
    module = kernel(decay=0.0)
    attend(module, relation())
    assert torch.equal(module.centroids, MEANS)
    module.after_update()
    close(module.centroids, VECTOR["out_means_new"])


def test_centroids_move_by_decay_and_stay_normalized():
    module = kernel(decay=0.9)
    attend(module, relation())
    module.after_update()
    close(module.centroids, F.normalize(0.9 * MEANS + 0.1 * VECTOR["out_means_new"], dim=-1))


def test_a_cluster_without_tokens_does_not_move():
    module = kernel(decay=0.5)
    first_centroid = MEANS[:, :1].expand(-1, Q.shape[2], -1).expand_as(Q)
    attend(module, relation(), first_centroid, first_centroid)
    module.after_update()
    close(module.centroids, MEANS)
    module.after_update()
    close(module.centroids, MEANS)


def test_empty_slots_do_not_affect_centroids_and_penalty():
    results = []
    for noise in (0.0, 1e4):
        module = kernel(window=None)
        real = INDEX.position[:, None, :, None] < 5
        index = TokenIndex(INDEX.position, torch.where(INDEX.position < 5, 0, EMPTY))
        attend(module, relation(index), torch.where(real, Q, noise), torch.where(real, K, -noise))
        module.after_update()
        results.append((module.penalty(), module.centroids))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.enable_grad], ids=["no gradient", "evaluation"])
def test_passes_without_learning_accumulate_nothing(grad_mode):
    module = kernel(decay=0.0).train(grad_mode is torch.no_grad)
    with grad_mode():
        attend(module, relation())
    module.after_update()
    assert torch.equal(module.centroids, MEANS)
    assert module.penalty() is None
