"""kNN-LM and SPALM reproduce their vectors."""

import pytest
import torch

from rlxf.attention.heads.datastore import Datastore, Neighbours
from rlxf.attention.heads.knn_lm import KNNLM
from rlxf.attention.heads.search import TorchSearch
from rlxf.attention.heads.spalm import SPALM, gathered
from tests.attention.oracle import close, load, put

KNN, GATED = load("knnlm"), load("spalm")
SIZE = KNN["in_plm"].shape[1]
NOWHERE = -10000
"""Log-probability of a value that no neighbour has, in the authors' code."""


def lm(**changes) -> KNNLM:
    return KNNLM(k=int(KNN["cfg_k"]), weight=float(KNN["cfg_lambda"]), **changes)


def near() -> Neighbours:
    values = KNN["in_values"][:, 0]
    store = Datastore(KNN["in_keys"], values, torch.arange(len(values)))
    queries = KNN["in_query"]
    return store.neighbours(queries, TorchSearch(store)(queries, int(KNN["cfg_k"])))


def test_what_followed_on_near_keys():
    close(lm().among(near(), SIZE).double(), KNN["out_pknn"], 1e-6)


def test_so_it_is_with_distances_that_are_not_squared():
    found = near()
    plain = Neighbours(found.squared.sqrt(), found.values)
    close(lm().among(plain, SIZE).double(), KNN["out_pknn_unsquared"], 1e-6)


def test_the_target_is_as_likely_as_by_the_authors_code():
    target = KNN["in_target"][:, None]
    ours = lm().among(near(), SIZE).gather(1, target)[:, 0].log().double()
    seen = KNN["out_authors_logp"] > NOWHERE / 2
    assert (ours[~seen & (target[:, 0] != 0)] == -torch.inf).all()  # the authors leave out value 0, padding
    close(ours[seen], KNN["out_authors_logp"][seen], 1e-6)


def test_mixture():
    mixed = lm().mixed(KNN["in_plm"].log(), lm().among(near(), SIZE).double())
    close(mixed.exp(), KNN["out_mix"], 1e-6)


def test_neighbours_enter_as_features():
    h, y = GATED["in_h"], GATED["in_neighbour_embeddings"]
    reader = SPALM().build(h.shape[1]).double()
    put(reader.gate, GATED["w_g"])
    close(gathered(h, y), GATED["out_m"])
    close(reader.openness(h)[:, None], GATED["out_g"])
    close(reader.features(h, y), GATED["out_z"])


@pytest.mark.parametrize("token", range(len(GATED["in_h"])))
def test_what_follows_by_the_features(token):
    """The vector's neighbours stand in a table of their own behind W, whose rows are nobody's logits."""
    h, y, w = GATED["in_h"][token : token + 1], GATED["in_neighbour_embeddings"][token], GATED["w_embedding"]
    reader = SPALM().build(h.shape[1]).double()
    put(reader.gate, GATED["w_g"])
    values = torch.arange(len(w), len(w) + len(y))[None]
    table = torch.cat([w, y])
    bias = torch.zeros(len(table)).double().index_fill(0, values[0], -torch.inf)
    log_p = reader.log_prob(h, Neighbours(torch.zeros_like(values).double(), values), table, bias)
    close(log_p[:, : len(w)].exp(), GATED["out_p"][token : token + 1])
