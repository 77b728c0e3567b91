"""Tests of saving and restoring the states of global random number generators."""

import random

import numpy as np
import pytest
import torch

from rlxf.training import CheckpointError
from rlxf.training.state_checks import get_rng_states, set_rng_states


def draws():
    """Return the next numbers of each generator; normal deviates are generated in pairs, one is cached."""
    return (
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        np.random.normal(size=3).tolist(),  # noqa: NPY002
        np.random.randint(1000, size=3).tolist(),  # noqa: NPY002
        [random.gauss(0, 1) for _ in range(3)],
        [random.random() for _ in range(3)],
    )


@pytest.mark.parametrize("before", range(4))
def test_restored_generators_repeat_their_draws(before):
    for _ in range(before):  # with and without a cached normal deviate
        random.gauss(0, 1)
        np.random.normal()  # noqa: NPY002
    states = get_rng_states()
    expected = draws()
    assert draws() != expected
    set_rng_states(states)
    assert draws() == expected


def test_reading_states_does_not_change_them():
    states = get_rng_states()
    again = get_rng_states()
    assert states.keys() == again.keys()
    assert all(torch.equal(states[name].nan_to_num(), again[name].nan_to_num()) for name in states)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch", torch.zeros(3, dtype=torch.uint8)),
        ("torch", torch.zeros(5000)),
        ("numpy", torch.zeros(7, dtype=torch.int64)),
        ("python", torch.zeros(7, dtype=torch.int64)),
        ("python", torch.full((625,), -1)),
        ("numpy", torch.tensor([*[1] * 624, 10**6])),
        ("numpy", torch.tensor([*[2**32] * 624, 3])),
        ("python_normal", torch.zeros(2)),
        ("numpy", None),
    ],
    ids=[
        "short",
        "no bytes",
        "too few words",
        "too few of Python",
        "negative",
        "beyond the end",
        "too large",
        "two",
        "missing",
    ],
)
def test_invalid_state_is_rejected(name, value):
    states = get_rng_states() | {name: value}
    if value is None:
        del states[name]
    with pytest.raises(
        CheckpointError, match="generators contain no valid states of random number generators"
    ):
        set_rng_states(states)
