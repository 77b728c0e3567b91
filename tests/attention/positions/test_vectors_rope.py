"""RoPE reproduces interleaved pairs, and half-split pairs after a permutation of features."""

import pytest
import torch
from torch import Tensor

from rlxf.attention import RoPE
from tests.attention.oracle import close, load

VECTOR = load("rope")
BATCH, _, LENGTH, SIZE = VECTOR["in_q"].shape
POSITION = torch.arange(LENGTH).expand(BATCH, -1)

# Feature m and feature m + D/2 become adjacent.
NEIGHBORS = torch.arange(SIZE).view(2, -1).T.flatten()


def half_pairing(rope: RoPE, x: Tensor) -> Tensor:
    rotated = rope.rotate(x[..., NEIGHBORS], POSITION)
    return rotated[..., NEIGHBORS.argsort()]


FACTOR, LONGEST = 2, 6
DYNAMIC = FACTOR * LENGTH / LONGEST - (FACTOR - 1)
SCALED = {
    "linear4": RoPE(scaling="linear", factor=4),
    "ntk4": RoPE(scaling="ntk", factor=4),
    f"dynamic_ntk_f{FACTOR}_max{LONGEST}": RoPE(scaling="ntk", factor=DYNAMIC),
}
"""At one length, the dynamic form equals the static form with another factor."""


@pytest.mark.parametrize("name", ["q", "k"])
def test_adjacent_features_are_pairs(name):
    close(RoPE().rotate(VECTOR[f"in_{name}"], POSITION), VECTOR[f"out_interleaved_{name}_plain"])


@pytest.mark.parametrize("name", ["q", "k"])
def test_half_pairing_after_a_permutation(name):
    close(half_pairing(RoPE(), VECTOR[f"in_{name}"]), VECTOR[f"out_half_{name}_plain"])


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("scaling", SCALED)
def test_scaling(scaling, name):
    close(half_pairing(SCALED[scaling], VECTOR[f"in_{name}"]), VECTOR[f"out_half_{name}_{scaling}"])


def test_ntk_keeps_the_fastest_pair_and_slows_the_slowest():
    plain, ntk, linear = (
        rope.frequencies(SIZE) for rope in (RoPE(), RoPE(scaling="ntk", factor=4), RoPE(factor=4))
    )
    close(ntk[0], plain[0])
    close(ntk[-1], linear[-1])
    close(linear, plain / 4)
    close(ntk, VECTOR["out_inv_freq_ntk4"])


@pytest.mark.parametrize("scaling", ["linear", "ntk"])
def test_factor_of_one_has_no_effect(scaling):
    close(RoPE(scaling=scaling, factor=1).frequencies(SIZE), RoPE().frequencies(SIZE), 1e-12)


def test_scores():
    q, k = (RoPE().rotate(VECTOR[f"in_{name}"], POSITION) for name in "qk")
    close(q @ k.transpose(-1, -2), VECTOR["out_scores_plain"])


def test_scores_are_invariant_to_a_shift_of_positions():
    rope = RoPE()
    q, k = (rope.rotate(VECTOR[f"in_{name}"], POSITION + 1000) for name in "qk")
    unshifted_q, unshifted_k = (rope.rotate(VECTOR[f"in_{name}"], POSITION) for name in "qk")
    close(q @ k.transpose(-1, -2), unshifted_q @ unshifted_k.transpose(-1, -2))
