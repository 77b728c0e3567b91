"""Tests of environments that a file describes."""

import re

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

from rlxf.envs import make_vec_env
from rlxf.envs.described_env import DescribedEnv
from rlxf.envs.specs import spec_of


def test_registered_environment_needs_no_trust():
    described = DescribedEnv("FrozenLake-v1", {"map_name": "4x4"}, 100)
    assert described.needs_trust() == []
    spec = described.local_spec()
    assert spec.entry_point == gymnasium.spec("FrozenLake-v1").entry_point
    assert (spec.kwargs["map_name"], spec.max_episode_steps) == ("4x4", 100)
    assert DescribedEnv("FrozenLake-v1", {"map_name": "8x8"}).needs_trust() == ["map_name='8x8'"]


@pytest.mark.parametrize(
    ("described", "untrusted"),
    [
        (DescribedEnv("CartPole-v1", {"sutton_barto_reward": True}), "sutton_barto_reward=True"),
        (DescribedEnv("Pendulum-v1", {"g": "/etc/passwd"}), "g='/etc/passwd'"),
        (DescribedEnv("CartPole-v1", {"render_mode": "human"}), "render_mode='human'"),
        (DescribedEnv("CartPole-v1", {}, 501), "max_episode_steps=501"),
        (DescribedEnv("CartPole-v1", {}, True), "max_episode_steps=True"),
        (DescribedEnv("CartPole-v1", {}, "9"), "max_episode_steps='9'"),
        (DescribedEnv("CartPole-v1", {}, None, ("ClipReward",)), "wrapper ClipReward"),
        (DescribedEnv("rlxf/TMaze-v0", {"autoreset_mode": "x"}), "autoreset_mode='x'"),
    ],
    ids=str,
)
def test_other_arguments_limits_and_wrappers_need_trust(described, untrusted):
    assert described.needs_trust() == [untrusted]
    with pytest.raises(ValueError, match=r"not used without trust.*--env .*trust=True") as refusal:
        described.local_spec()
    assert untrusted in str(refusal.value)


def test_shorter_limit_is_used_and_a_missing_one_is_the_registered():
    assert DescribedEnv("CartPole-v1", {}, 17).local_spec().max_episode_steps == 17
    assert DescribedEnv("CartPole-v1").local_spec().max_episode_steps == 500


def test_arguments_of_the_caller_need_no_trust():
    described = DescribedEnv("Pendulum-v1", {"g": 5.0, "mass": 2.0})
    assert described.needs_trust(["g"]) == ["mass=2.0"]


def test_tmaze_arguments_need_no_trust():
    described = DescribedEnv("rlxf/TMaze-v0", {"corridor_length": 7, "active": True, "penalty": -0.5})
    assert described.local_spec().kwargs["corridor_length"] == 7
    with pytest.raises(ValueError, match="corridor_length must be at most 1,000,000"):
        gymnasium.make(DescribedEnv("rlxf/TMaze-v0", {"corridor_length": 10**9}).local_spec())


@pytest.mark.parametrize(("env_id", "kwargs"), [(3, {}), (None, {}), ("CartPole-v1", [1])])
def test_invalid_description_raises(env_id, kwargs):
    with pytest.raises(ValueError, match="an environment is an id and its arguments"):
        DescribedEnv(env_id, kwargs)


@pytest.mark.parametrize(
    ("described", "difference"),
    [
        (DescribedEnv("CartPole-v1", {}, 200), None),
        (DescribedEnv("CartPole-v9"), r"^CartPole-v9 is not registered here, but CartPole-v0, CartPole-v1: "),
        (DescribedEnv("CartPole"), "^CartPole is not registered here, but CartPole-v0"),
        (DescribedEnv("CartPole-v1", {"x": 2}), r"^the data describe CartPole-v1 with x=2, which differs"),
        (DescribedEnv("os:CartPole-v1"), "a module that a file names is not imported"),
        (DescribedEnv("no id!"), "unknown environment id 'no id!'"),
    ],
    ids=repr,
)
def test_registration_describes_the_difference(described, difference):
    text = described.registration()
    if difference is None:
        assert text is None
    else:
        assert re.search(difference, text)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"id": "CartPole-v0"}, True),
        ({"max_episode_steps": None}, True),
        ({"kwargs": {"x": [1.0], "render_mode": "rgb_array", "width": 64}}, True),
        ({"kwargs": {"x": [1], "num_envs": 2, "vectorization_mode": "vector_entry_point"}}, True),
        ({"kwargs": {"x": [1], "max_episode_steps": 100}, "max_episode_steps": None}, False),
        ({"kwargs": {"x": [2]}}, False),
        ({"kwargs": {}}, False),
        ({"kwargs": {"x": [1], "sutton_barto_reward": True}}, False),
        ({"max_episode_steps": 100}, False),
        ({"id": "Acrobot-v1"}, False),
    ],
)
def test_returns_are_comparable_in_the_same_task_only(changes, same):
    described = DescribedEnv("CartPole-v1", {"x": (1,)}, 500)
    spec = EnvSpec(**{"id": "CartPole-v1", "kwargs": {"x": [1]}, "max_episode_steps": 500} | changes)
    assert described.is_same_task(spec) is same
    assert described.is_same_task(None)


@pytest.mark.parametrize("env_id", ["rlxf/TMaze-v0", "CartPole-v1"])
def test_made_environments_are_those_of_a_description(env_id):
    described = DescribedEnv(env_id)
    assert described.is_same_task(spec_of(make_vec_env(env_id, 2)))
    assert described.is_same_task(gymnasium.spec(env_id))
    other = {"corridor_length": 9} if "TMaze" in env_id else {"sutton_barto_reward": True}
    assert not described.is_same_task(spec_of(make_vec_env(env_id, 2, env_kwargs=other)))
