"""Tests of the T-Maze on tensors against the one on arrays."""

import json
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

from rlxf.envs import TensorVecEnv, TMazeTensor, TMazeVector, make_vec_env
from rlxf.envs.tmaze import LEFT, RIGHT, UP

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP]


def as_arrays(values: Any) -> Any:
    """Convert tensors in nested dicts and tuples to arrays, and object arrays of rows to one array."""
    if isinstance(values, dict):
        return {key: as_arrays(value) for key, value in values.items()}
    if isinstance(values, tuple):
        return tuple(map(as_arrays, values))
    if isinstance(values, torch.Tensor):
        return values.numpy()
    return np.stack(list(values)) if values.dtype == object else values


def assert_same(actual: Any, expected: Any) -> None:
    """Assert equal values; floats are compared in float32, the precision of the tensors."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        actual, expected = list(actual.values()), [expected[key] for key in actual]
    if isinstance(expected, np.ndarray):
        reals = expected.astype(np.float32) if expected.dtype == np.float64 else expected
        np.testing.assert_array_equal(actual, reals, strict=True)
        return
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)


@settings(deadline=None, max_examples=40)
@given(
    num_envs=st.integers(1, 4),
    corridor_length=st.integers(1, 4),
    active=st.booleans(),
    rule=st.sampled_from(["step", "schedule"]),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 1000),
)
def test_tensors_equal_arrays_step_by_step(num_envs, corridor_length, active, rule, mode, seed):
    options = {"penalty_rule": rule, "autoreset_mode": mode}
    one = TMazeTensor(num_envs, corridor_length, active, device="cpu", **options)
    other = TMazeVector(num_envs, corridor_length, active, **options)
    assert_same(as_arrays(one.reset(seed=seed)), as_arrays(other.reset(seed=seed)))
    for actions in np.random.default_rng(seed).integers(0, 4, (30, num_envs)):
        assert_same(as_arrays(one.step(torch.from_numpy(actions))), as_arrays(other.step(actions)))


def test_returned_tensors_are_new_in_each_step():
    env = TMazeTensor(2, 3, device="cpu")
    first, _ = env.reset(seed=0)
    kept = first.clone()
    env.step(torch.tensor([RIGHT, UP]))
    assert torch.equal(first, kept)


def test_agents_that_walk_to_the_hinted_arm_succeed_in_4096_copies():
    env = TMazeTensor(4096, 3, device="cpu")
    hints, _ = env.reset(seed=0)
    for _ in range(3):
        env.step(torch.full((4096,), RIGHT))
    arm = torch.where(hints[:, 1] > 0, UP, 3)
    _, rewards, terminated, truncated, infos = env.step(arm)
    assert rewards.sum() == 4096
    assert terminated.all()
    assert not truncated.any()
    assert infos["final_info"]["is_success"].all()
    assert 0.4 < (hints[:, 1] > 0).double().mean() < 0.6


def test_state_continues_with_the_same_steps():
    one, other = TMazeTensor(3, 2, True, device="cpu"), TMazeTensor(3, 2, True, device="cpu")
    one.reset(seed=5)
    one.step(torch.tensor([LEFT, RIGHT, UP]))
    other.load_state(json.loads(json.dumps(one.state())))
    for actions in torch.randint(4, (12, 3), generator=torch.Generator().manual_seed(0)):
        assert_same(as_arrays(one.step(actions)), as_arrays(other.step(actions)))


@pytest.mark.parametrize(
    "actions",
    [
        torch.zeros(2),
        torch.zeros(3, dtype=torch.long),
        torch.zeros(2, dtype=torch.long, device="meta"),
        [0, 1],
    ],
    ids=["floats", "number", "device", "list"],
)
def test_invalid_actions_are_rejected(actions):
    env = TMazeTensor(2, device="cpu")
    with pytest.raises(ResetNeeded):
        env.step(torch.zeros(2, dtype=torch.long))
    env.reset()
    with pytest.raises(ValueError, match="actions must be a tensor of 2 integers on cpu"):
        env.step(actions)


@pytest.mark.parametrize(("env_id", "steps"), [("rlxf/TMazeTensor-v0", 6), ("rlxf/TMazeActiveTensor-v0", 8)])
def test_registered_ids_make_tensor_environments(env_id, steps):
    env = gymnasium.make_vec(env_id, 3, corridor_length=5, device="cpu")
    assert isinstance(env.unwrapped, TMazeTensor)
    assert env.unwrapped.rules.horizon == steps
    assert isinstance(make_vec_env(env_id, 3, env_kwargs={"device": "cpu"}), TensorVecEnv)
