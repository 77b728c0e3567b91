"""Tests of stored weights, optimizer states, states of random generators and VecNormalize statistics."""

import math
import random
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize
from torch import nn

from rlxf.training import CheckpointError, load_normalizer, save_normalizer, write_archive
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


NUMBERS = spaces.Box(-9, 9, (3,))
NAMED = spaces.Dict({"near": NUMBERS, "far": spaces.Box(-9, 9, (2,)), "kind": spaces.Discrete(2)})


class Noise(gymnasium.Env):
    """Environment with random observations; the reward is the action."""

    action_space = spaces.Discrete(2)

    def __init__(self, observation_space):
        self.observation_space = observation_space

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(action), False, False, {}


def noise(space: spaces.Space = NUMBERS) -> DummyVecEnv:
    return DummyVecEnv([lambda: Noise(space)] * 2)


def experienced(space: spaces.Space = NUMBERS, **settings: object) -> VecNormalize:
    """Return a VecNormalize with the statistics of thirty steps."""
    normalizer = VecNormalize(noise(space), **settings)
    normalizer.reset()
    for step in range(30):
        normalizer.step(np.array([step % 2, 1]))
    return normalizer


CASES = {
    "numbers": lambda: experienced(),
    "Dict": lambda: experienced(NAMED, norm_obs_keys=["near", "far"], clip_obs=1.5),
    "rewards alone": lambda: experienced(norm_obs=False, gamma=0.5, clip_reward=2.0),
    "fresh": lambda: VecNormalize(noise(), epsilon=1e-3),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_loaded_normalizer_gives_equal_observations_and_rewards(tmp_path, make):
    saved = make()
    save_normalizer(tmp_path / "file", saved)
    loaded = load_normalizer(tmp_path / "file", noise(saved.observation_space))
    observation = saved.observation_space.sample()
    np.testing.assert_equal(loaded.normalize_obs(observation), saved.normalize_obs(observation))
    np.testing.assert_equal(loaded.normalize_reward(np.ones(2)), saved.normalize_reward(np.ones(2)))


def test_loaded_statistics_are_updated_equally(tmp_path):
    saved = experienced()
    save_normalizer(tmp_path / "file", saved)
    loaded = load_normalizer(tmp_path / "file", noise())
    batch = np.arange(6.0).reshape(2, 3)
    for normalizer in (saved, loaded):
        normalizer.obs_rms.update(batch)
        normalizer.ret_rms.update(batch[:, 0])
    np.testing.assert_array_equal(loaded.obs_rms.mean, saved.obs_rms.mean)
    np.testing.assert_array_equal(loaded.obs_rms.var, saved.obs_rms.var)
    assert loaded.ret_rms.var == saved.ret_rms.var
    assert (loaded.obs_rms.count, loaded.ret_rms.count) == (saved.obs_rms.count, saved.ret_rms.count)


def test_normalizer_inside_another_wrapper_is_saved(tmp_path):
    saved = experienced()
    save_normalizer(tmp_path / "file", VecMonitor(saved))
    loaded = load_normalizer(tmp_path / "file", noise())
    np.testing.assert_array_equal(loaded.obs_rms.mean, saved.obs_rms.mean)


@pytest.mark.parametrize("make", [noise, lambda: Noise(NUMBERS), lambda: None], ids=["VecEnv", "Env", "None"])
def test_environment_without_statistics_is_not_saved(tmp_path, make):
    with pytest.raises(
        TypeError, match=r"statistics of a VecNormalize, got .* without one: train in VecNorm"
    ):
        save_normalizer(tmp_path / "file", make())
    assert not list(tmp_path.iterdir())


def test_statistics_are_not_loaded_into_a_single_environment(tmp_path):
    save_normalizer(tmp_path / "file", experienced())
    with pytest.raises(TypeError, match=r"wraps a VecEnv, got Noise: pass rlxf.envs.make_vec_env\("):
        load_normalizer(tmp_path / "file", Noise(NUMBERS))


def test_other_observation_space_is_rejected(tmp_path):
    save_normalizer(tmp_path / "file", experienced())
    with pytest.raises(
        CheckpointError,
        match=r"observation space differs.*mean of observation.*\(3,\) in the file and \(5,\) here",
    ):
        load_normalizer(tmp_path / "file", noise(spaces.Box(-1, 1, (5,))))
    with pytest.raises(CheckpointError, match="observation"):
        load_normalizer(tmp_path / "file", noise(NAMED))


@pytest.mark.parametrize("document", [{}, {"normalizer": []}, {"normalizer": {"name": "Other"}}], ids=str)
def test_other_file_is_rejected(tmp_path, document):
    write_archive(tmp_path / "file", document, {})
    with pytest.raises(CheckpointError, match="contains no statistics of VecNormalize"):
        load_normalizer(tmp_path / "file", noise())


def test_unknown_setting_is_rejected(tmp_path):
    document = {"name": "VecNormalize", "settings": {"norm_dreams": True}}
    write_archive(tmp_path / "file", {"normalizer": document}, {"statistics": {}})
    with pytest.raises(CheckpointError, match="norm_dreams"):
        load_normalizer(tmp_path / "file", noise())


@pytest.mark.faults
def test_truncated_file_is_rejected(tmp_path):
    save_normalizer(tmp_path / "file", experienced())
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="file"):
        load_normalizer(tmp_path / "file", noise())
