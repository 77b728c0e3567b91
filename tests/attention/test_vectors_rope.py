"""RoPE reproduces the interleaved pairing, and the half pairing after a permutation of features."""

import pytest
import torch
from torch import Tensor

from rlxf.attention import RoPE
from tests.attention.oracle import close, load

VECTOR = load("rope")
BATCH, _, LENGTH, SIZE = VECTOR["in_q"].shape
POSITION = torch.arange(LENGTH).expand(BATCH, -1)

# Feature m and feature m + D/2 become neighbours.
NEIGHBOURS = torch.arange(SIZE).view(2, -1).T.flatten()


def half_pairing(rope: RoPE, x: Tensor) -> Tensor:
    turned = rope.rotate(x[..., NEIGHBOURS], POSITION)
    return turned[..., NEIGHBOURS.argsort()]


def base(scaling: str) -> float:
    """The base whose second frequency, ``base^(-2/D)``, is the vector's."""
    return float(VECTOR[f"out_inv_freq_{scaling}"][1]) ** (-SIZE / 2)


@pytest.mark.parametrize("name", ["q", "k"])
def test_neighbours_are_pairs(name):
    close(RoPE().rotate(VECTOR[f"in_{name}"], POSITION), VECTOR[f"out_interleaved_{name}_plain"])


@pytest.mark.parametrize("name", ["q", "k"])
def test_half_pairing_after_a_permutation(name):
    close(half_pairing(RoPE(), VECTOR[f"in_{name}"]), VECTOR[f"out_half_{name}_plain"])


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("scaling", ["ntk4", "dynamic_ntk_f2_max6"])
def test_other_bases(scaling, name):
    turned = half_pairing(RoPE(base(scaling)), VECTOR[f"in_{name}"])
    close(turned, VECTOR[f"out_half_{name}_{scaling}"])


def test_scores():
    q, k = (RoPE().rotate(VECTOR[f"in_{name}"], POSITION) for name in "qk")
    close(q @ k.transpose(-1, -2), VECTOR["out_scores_plain"])


def test_a_shift_of_all_positions_changes_no_score():
    rope = RoPE()
    q, k = (rope.rotate(VECTOR[f"in_{name}"], POSITION + 1000) for name in "qk")
    here, there = (rope.rotate(VECTOR[f"in_{name}"], POSITION) for name in "qk")
    close(q @ k.transpose(-1, -2), here @ there.transpose(-1, -2))
