"""Tests of stored weights, optimizer states and states of random generators."""

import math
import random
from functools import partial

import numpy as np
import pytest
import torch
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from torch import nn

from rlxf.training import CheckpointError
from rlxf.training.states import (
    check_weights_fit,
    get_rng_states,
    optimizer_state,
    optimizer_tensors,
    set_rng_states,
)


@pytest.fixture
def network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def weights(network, **changes):
    return network.state_dict() | changes


def test_state_dict_of_a_module_fits(network):
    check_weights_fit(network, weights(network), "policy")


@pytest.mark.parametrize("name", ["0.weight", "1.running_mean", "1.num_batches_tracked"])
def test_missing_tensor_is_reported(network, name):
    tensors = weights(network)
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"policy lacks the tensor '{name}'"):
        check_weights_fit(network, tensors, "policy")


def test_unexpected_tensor_is_reported(network):
    with pytest.raises(CheckpointError, match=r"policy has a tensor '2.weight'"):
        check_weights_fit(network, weights(network, **{"2.weight": torch.zeros(1)}), "policy")


@pytest.mark.parametrize("shape", [(4, 2), (3, 4), (12,), (1, 4, 3), ()])
def test_wrong_shape_is_reported(network, shape):
    with pytest.raises(CheckpointError, match=r"policy, the tensor '0.weight' has shape .*, not \(4, 3\)"):
        check_weights_fit(network, weights(network, **{"0.weight": torch.zeros(shape)}), "policy")


OPTIMIZERS = {
    "Adam": torch.optim.Adam,
    "Adam with amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
    "RMSprop, centered": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "SGD": torch.optim.SGD,
    "SGD with momentum": partial(torch.optim.SGD, momentum=0.9),
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
    "RAdam": torch.optim.RAdam,
    "RMSprop of SB3, whose step is a number": RMSpropTFLike,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_restored_optimizer_continues_equally(kind):
    networks = [nn.Linear(3, 4) for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    first, second = (kind(network.parameters(), lr=0.1) for network in networks)
    for _ in range(3):
        step(networks[0], first)
    networks[1].load_state_dict(networks[0].state_dict())
    stored = {name: tensor.clone() for name, tensor in optimizer_tensors(first).items()}
    second.load_state_dict(optimizer_state(second, stored, updates=3))
    for network, optimizer in zip(networks, (first, second), strict=True):
        step(network, optimizer)
    assert torch.equal(networks[0].weight, networks[1].weight)


def step(network, optimizer) -> None:
    optimizer.zero_grad()
    network(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_non_finite_optimizer_state_is_rejected(kind, number):
    network = nn.Linear(3, 4)
    optimizer = kind(network.parameters(), lr=0.1)
    step(network, optimizer)
    stored = optimizer_tensors(optimizer)
    for name, tensor in stored.items():
        if not tensor.is_floating_point():
            continue
        with pytest.raises(CheckpointError, match=f"'{name}' contains {number}"):
            optimizer_state(optimizer, stored | {name: torch.full_like(tensor, number)})


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_state_of_wrong_shape_or_dtype_is_rejected(kind):
    network = nn.Linear(3, 4)
    optimizer = kind(network.parameters(), lr=0.1)
    step(network, optimizer)
    stored = optimizer_tensors(optimizer)
    for name, tensor in stored.items():
        for other, message in (
            (tensor[None], "has shape"),
            (tensor.to(torch.float16), "is of torch.float16"),
        ):
            with pytest.raises(CheckpointError, match=f"'{name}' {message}"):
                optimizer_state(optimizer, stored | {name: other})


@pytest.mark.parametrize(
    ("kind", "name"),
    [("Adam", "exp_avg_sq"), ("RMSprop", "square_avg"), ("Adamax", "exp_inf"), ("Adam", "step")],
)
def test_negative_mean_of_squares_is_rejected(kind, name):
    network = nn.Linear(3, 4)
    optimizer = OPTIMIZERS[kind](network.parameters(), lr=0.1)
    step(network, optimizer)
    stored = optimizer_tensors(optimizer)
    with pytest.raises(CheckpointError, match=f"'0.{name}' contains -"):
        optimizer_state(optimizer, stored | {f"0.{name}": -stored[f"0.{name}"]})


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        ("0.exp_avg", (4, 2), r"'0.exp_avg' has shape \(4, 2\), not \(4, 3\)"),
        ("2.exp_avg", (4, 3), "'2.exp_avg', for which the agent has no parameter"),
        ("-1.exp_avg", (4, 3), "'-1.exp_avg', for which"),
        ("exp_avg", (4, 3), "'exp_avg', for which"),
    ],
)
def test_optimizer_state_without_parameter_is_reported(key, shape, message):
    optimizer = torch.optim.Adam(nn.Linear(3, 4).parameters())
    others = {"0.exp_avg_sq": torch.zeros(4, 3), "0.step": torch.tensor(1.0)} if key == "0.exp_avg" else {}
    with pytest.raises(CheckpointError, match=f"optimizer.*{message}"):
        optimizer_state(optimizer, {key: torch.zeros(shape), **others})


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
        ("python", torch.zeros(625, dtype=torch.float64)),
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
        "floats",
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
