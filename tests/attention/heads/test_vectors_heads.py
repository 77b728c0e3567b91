"""kNN-LM and SPALM reproduce the formulas and the authors' code of the reference vectors."""

import pytest
import torch

from rlxf.attention.heads.base import Datastore, Neighbors, TorchSearch
from rlxf.attention.heads.knn_lm import KNNLM
from rlxf.attention.heads.spalm import SPALM, aggregate_neighbors
from tests.attention.oracle import close, load, put

KNN, GATED = load("knnlm"), load("spalm")
SIZE = KNN["in_plm"].shape[1]
NO_NEIGHBOR = -10000
"""Log-probability of a value without neighbors, in the authors' code."""


def lm(**changes) -> KNNLM:
    return KNNLM(k=int(KNN["cfg_k"]), weight=float(KNN["cfg_lambda"]), **changes)


def find_neighbors() -> Neighbors:
    values = KNN["in_values"][:, 0]
    store = Datastore(KNN["in_keys"], values, torch.arange(len(values)))
    queries = KNN["in_query"]
    return store.neighbors(queries, TorchSearch(store)(queries, int(KNN["cfg_k"])))


def test_knn_distribution():
    close(lm().neighbor_distribution(find_neighbors(), SIZE).double(), KNN["out_pknn"], 1e-6)


def test_knn_distribution_of_unsquared_distances():
    ours = lm(distance="l2").neighbor_distribution(find_neighbors(), SIZE)
    close(ours.double(), KNN["out_pknn_unsquared"], 1e-6)


def test_log_probability_of_the_target_equals_the_authors_code():
    target = KNN["in_target"][:, None]
    ours = lm().neighbor_distribution(find_neighbors(), SIZE).gather(1, target)[:, 0].log().double()
    has_neighbors = KNN["out_authors_logp"] > NO_NEIGHBOR / 2
    assert (
        ours[~has_neighbors & (target[:, 0] != 0)] == -torch.inf
    ).all()  # the authors exclude value 0, padding
    close(ours[has_neighbors], KNN["out_authors_logp"][has_neighbors], 1e-6)


def test_mixture():
    mixed = lm().mixed(KNN["in_plm"].log(), lm().neighbor_distribution(find_neighbors(), SIZE).double())
    close(mixed.exp(), KNN["out_mix"], 1e-6)


def test_features_of_neighbors():
    h, y = GATED["in_h"], GATED["in_neighbour_embeddings"]
    reader = SPALM().build(h.shape[1]).double()
    put(reader.gate, GATED["w_g"])
    close(aggregate_neighbors(h, y), GATED["out_m"])
    close(reader.model_weight(h)[:, None], GATED["out_g"])
    close(reader.features(h, y), GATED["out_z"])


@pytest.mark.parametrize("token", range(len(GATED["in_h"])))
def test_distribution_from_the_features(token):
    """The vector's neighbors have separate rows in the table after W, whose own logits are masked."""
    h, y, w = GATED["in_h"][token : token + 1], GATED["in_neighbour_embeddings"][token], GATED["w_embedding"]
    reader = SPALM().build(h.shape[1]).double()
    put(reader.gate, GATED["w_g"])
    values = torch.arange(len(w), len(w) + len(y))[None]
    table = torch.cat([w, y])
    bias = torch.zeros(len(table)).double().index_fill(0, values[0], -torch.inf)
    log_p = reader.log_prob(h, Neighbors(torch.zeros_like(values).double(), values), table, bias)
    close(log_p[:, : len(w)].exp(), GATED["out_p"][token : token + 1])
