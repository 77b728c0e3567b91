"""FLOATER reproduces the authors' flow and solver; finer steps approach the exact solution."""

import pytest
import torch
from torch import Tensor

from rlxf.attention import Floater, TransformerSpec
from rlxf.attention.positions.floater import FloaterEmbedding
from tests.attention.oracle import close, fill, load

VECTOR = load("floater")
LENGTH, *START, WIDTH = VECTOR["out_rk4"].shape
AUTHORS_SUBSTEPS = 5


def build_embedding(substeps: int) -> FloaterEmbedding:
    spec = Floater(step=float(VECTOR["cfg_dt"]), substeps=substeps)
    embedding = spec.build_embedding(WIDTH, 1).double()
    fill(embedding.inner, VECTOR["w_1"].T, VECTOR["w_b1"])
    fill(embedding.outer, VECTOR["w_2"].T, VECTOR["w_b2"])
    return embedding


def points(substeps: int) -> Tensor:
    """Return the flow from each of the vector's starts; it does not depend on the embedding's p(0)."""
    return build_embedding(substeps).extend(VECTOR["w_p0"][None], LENGTH)


def test_authors_solver():
    close(points(AUTHORS_SUBSTEPS), VECTOR["out_rk4"])


def test_finer_steps_approach_the_exact_solution():
    close(points(AUTHORS_SUBSTEPS), VECTOR["out_exact"], 1e-5)
    errors = [(points(substeps) - VECTOR["out_exact"]).abs().max() for substeps in (1, 4, 16)]
    assert errors[0] > errors[1] > errors[2]


def test_tokens_get_the_vector_of_their_position():
    embedding = build_embedding(substeps=2)
    whole = embedding.extend(embedding.start[None], LENGTH)
    position = torch.tensor([[LENGTH - 1, 0, 2], [1, 1, 3]])
    x = torch.zeros(2, 3, WIDTH, dtype=torch.float64)
    close(embedding(x, position), whole[position], 1e-12)


def test_cached_positions_are_extended_and_recomputed_for_new_weights():
    embedding = build_embedding(substeps=1)
    x, calls = torch.zeros(1, 1, WIDTH, dtype=torch.float64), []
    embedding.inner.register_forward_hook(lambda *_: calls.append(1))

    def at(position: int) -> Tensor:
        return embedding(x, torch.tensor([[position]]))[0, 0]

    with torch.no_grad():
        fourth = at(3)
        first_calls = len(calls)
        at(1)
        assert len(calls) == first_calls
        fifth = at(4)
        assert len(calls) < 2 * first_calls
    close(fourth, at(3), 1e-12)
    close(fifth, at(4), 1e-12)
    torch.optim.Adam(embedding.parameters(), fused=True).zero_grad()
    at(4).sum().backward()
    torch.optim.Adam(embedding.parameters(), fused=True).step()
    with torch.no_grad():
        changed = at(4)
    assert not torch.allclose(changed, fifth)
    close(changed, at(4), 1e-12)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("width", [16, 64, 256])
def test_late_positions_do_not_dominate_tokens(width):
    """A vector far larger than a token would suppress the token after the layer norm."""
    spec = TransformerSpec(width=width, layers=1, heads=4, position=Floater())
    torch.manual_seed(0)
    embedding = spec.build().embedding
    with torch.no_grad():
        positions = embedding(torch.zeros(1, 3, width), torch.tensor([[0, 1000, 10_000]]))[0]
    assert (positions.norm(dim=-1) < 100 * width**0.5).all()
    assert positions[1:].sub(positions[0]).norm(dim=-1).gt(0.05 * width**0.5).all()
