"""Tests of output heads that mix the model's distribution with that of neighbors."""

import pytest
import torch
from torch.nn import functional as F

from rlxf.attention import KNNLM, SPALM
from rlxf.attention.heads.base import Neighbors
from rlxf.attention.registry import HEADS, technique_from_json, technique_to_json

B, K, C, V = 5, 7, 6, 4


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_neighbors() -> Neighbors:
    values = torch.randint(V, (B, K), generator=torch.Generator().manual_seed(3))
    return Neighbors(drawn(B, K, seed=4).square().sort().values, values)


H, W, BIAS = drawn(B, C), drawn(V, C, seed=1), drawn(V, seed=2)
MODEL = F.linear(H, W, BIAS).log_softmax(dim=1)


@pytest.mark.parametrize(
    "head", [KNNLM(), KNNLM(weight=1.0), KNNLM(temperature=9.0), KNNLM(distance="l2"), SPALM()], ids=repr
)
def test_head_outputs_are_distributions(head):
    log_p = head.build(C).log_prob(H, some_neighbors(), W, BIAS)
    torch.testing.assert_close(log_p.exp().sum(dim=1), torch.ones(B))
    share = head.build(C).neighbor_weight(H)
    assert share.shape == (B,)
    assert ((share >= 0) & (share <= 1)).all()


def test_weight_0_equals_model():
    assert torch.equal(KNNLM(weight=0.0).build(C).log_prob(H, some_neighbors(), W, BIAS), MODEL)


def test_weight_1_equals_neighbor_distribution():
    near = some_neighbors()
    for i, row in enumerate(KNNLM(weight=1.0).build(C).log_prob(H, near, W, BIAS)):
        weights = [float(torch.exp(-d)) for d in near.squared[i]]
        for value in range(V):
            mass = sum(w for w, v in zip(weights, near.values[i].tolist(), strict=True) if v == value)
            assert float(row[value].exp()) == pytest.approx(mass / sum(weights), abs=1e-6)


def test_knn_lm_interpolates_linearly():
    near = some_neighbors()
    half, whole = (KNNLM(weight=w).build(C).log_prob(H, near, W, BIAS).exp() for w in (0.3, 1.0))
    torch.testing.assert_close(half, 0.3 * whole + 0.7 * MODEL.exp())


def test_temperature_interpolates_between_uniform_and_nearest():
    near = some_neighbors()
    torch.testing.assert_close(KNNLM(temperature=1e6).weights(near), torch.full((B, K), 1 / K))
    assert (KNNLM(temperature=1e-6).weights(near)[:, 0] > 0.999).all()


@pytest.mark.parametrize("distance", ["squared_l2", "l2"])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("far", [0.0, 1e3], ids=["near", "weights of 0"])
def test_gradients_of_neighbors_are_finite(distance, weight, far):
    """A neighbor at distance 0, a neighbor whose weight underflows, and values without neighbors."""
    h = H.clone().requires_grad_()
    keys = h.detach()[:, None] + far * drawn(B, 2, C, seed=7) * torch.tensor([0.0, 1.0])[:, None]
    near = Neighbors((keys - h[:, None]).square().sum(-1), torch.tensor([[0, 1]]).expand(B, -1))
    log_p = KNNLM(distance=distance, weight=weight).build(C).log_prob(h, near, W, BIAS)
    log_p[:, 0].sum().backward()
    assert h.grad.isfinite().all()


def test_small_temperatures_choose_the_nearest_neighbor():
    near = some_neighbors()
    for head in (KNNLM(temperature=1e-37), KNNLM(temperature=1e-37, distance="l2"), SPALM(temperature=1e-37)):
        assert torch.equal(head.weights(near), F.one_hot(torch.zeros(B, dtype=torch.long), K).float())


def test_weights_of_distant_neighbors_sum_to_1():
    far = Neighbors(some_neighbors().squared + 1e6, some_neighbors().values)
    torch.testing.assert_close(KNNLM().weights(far).sum(dim=1), torch.ones(B))


def test_open_gate_equals_model():
    reader = SPALM().build(C)
    with torch.no_grad():
        reader.gate.copy_(1e4 * H[0])
    near = Neighbors(*(part[:1] for part in some_neighbors()))
    assert reader.neighbor_weight(H[:1]).item() == 0
    torch.testing.assert_close(reader.log_prob(H[:1], near, W, BIAS), MODEL[:1])


def test_neighbors_with_one_value_increase_its_probability():
    one = Neighbors(torch.zeros(B, K), torch.full((B, K), 2))
    for head in (KNNLM(), SPALM()):
        likely = head.build(C).log_prob(H, one, W, torch.zeros(V))[:, 2].exp()
        assert (likely > F.linear(H, W).softmax(dim=1)[:, 2]).all()


def test_gate_gets_a_gradient():
    reader = SPALM().build(C)
    assert [name for name, _ in reader.named_parameters()] == ["gate"]
    reader.log_prob(H, some_neighbors(), W, BIAS)[:, 0].sum().backward()
    assert (reader.gate.grad != 0).all()


@pytest.mark.parametrize("head", HEADS.values())
def test_head_json_round_trips(head):
    changed = head(k=3, temperature=2.5)
    assert technique_from_json("head", technique_to_json(changed)) == changed


def test_unknown_head_raises():
    with pytest.raises(ValueError, match="there is no head named 'Oracle'; there are KNNLM, SPALM"):
        technique_from_json("head", {"name": "Oracle"})


@pytest.mark.parametrize("head", HEADS.values())
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"temperature": 0.0}, r"temperature must be above 0, got 0\.0"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"index": "hnsw"}, "index must be one of"),
    ],
)
def test_options_out_of_range_raise(head, options, message):
    with pytest.raises(ValueError, match=f"{head.__name__} {message}"):
        head(**options)


def test_printed_weights_fall_with_the_distance_itself():
    near, temperature = some_neighbors(), 2.0
    weights = torch.exp(-near.squared.sqrt() / temperature)
    actual = KNNLM(temperature=temperature, distance="l2").weights(near)
    torch.testing.assert_close(actual, weights / weights.sum(dim=1, keepdim=True))


def test_unknown_distance_raises():
    with pytest.raises(
        ValueError, match=r"KNNLM distance must be one of \('squared_l2', 'l2'\), got 'cosine'"
    ):
        KNNLM(distance="cosine")


@pytest.mark.parametrize("weight", [-0.1, 1.5])
def test_lambda_must_be_in_0_to_1(weight):
    with pytest.raises(ValueError, match=rf"KNNLM weight \(lambda\) must be from 0 to 1, got {weight}"):
        KNNLM(weight=weight)
