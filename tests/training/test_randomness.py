"""After the states of all generators are put back, the same is drawn again."""

import random

import numpy as np
import pytest
import torch

from rlxf.training import CheckpointError
from rlxf.training.randomness import generator_states, set_generator_states


def draws():
    """What each generator gives next; the normal ones come in pairs, of which one waits."""
    return (
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        np.random.normal(size=3).tolist(),  # noqa: NPY002
        np.random.randint(1000, size=3).tolist(),  # noqa: NPY002
        [random.gauss(0, 1) for _ in range(3)],
        [random.random() for _ in range(3)],
    )


@pytest.mark.parametrize("before", range(4))
def test_the_same_is_drawn_again(before):
    for _ in range(before):  # so that at times a normal number waits, at times none
        random.gauss(0, 1)
        np.random.normal()  # noqa: NPY002
    states = generator_states()
    expected = draws()
    assert draws() != expected
    set_generator_states(states)
    assert draws() == expected


def test_a_state_taken_twice_is_the_same_state():
    states = generator_states()
    again = generator_states()
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
def test_what_is_no_state_is_refused(name, value):
    states = generator_states() | {name: value}
    if value is None:
        del states[name]
    with pytest.raises(CheckpointError, match="generators hold no states of random generators"):
        set_generator_states(states)
