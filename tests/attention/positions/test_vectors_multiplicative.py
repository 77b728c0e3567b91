"""Multiplicative positions reproduce the factors of each position; factors of 1 are the identity."""

import torch

from rlxf.attention import Multiplicative
from tests.attention.oracle import close, load, put

VECTOR = load("multiplicative_absolute")
BATCH, LENGTH, WIDTH = VECTOR["in_x"].shape
POSITION = torch.arange(LENGTH).expand(BATCH, -1)


def multiplied(table: torch.Tensor) -> torch.Tensor:
    embedding = Multiplicative(len(table)).build_embedding(WIDTH, 1).double()
    put(embedding.weight, table)
    return embedding(VECTOR["in_x"], POSITION)


def test_factors():
    close(multiplied(VECTOR["w_table"]), VECTOR["out"], 1e-12)


def test_factors_of_one_are_the_identity():
    assert torch.equal(multiplied(torch.ones_like(VECTOR["w_table"])), VECTOR["in_x"])


def test_initial_factors_are_near_one():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        factors = Multiplicative().build_embedding(WIDTH, 1).weight
    assert (factors - 1).abs().max() < 0.2
    assert factors.std() > 0
