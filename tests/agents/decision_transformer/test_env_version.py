"""Tests of the warning for environments of another version than the dataset's."""

import warnings

import gymnasium
import pytest

from rlxf import DecisionTransformer, evaluate
from rlxf.agents.decision_transformer import MaximumEntropy
from rlxf.envs import make_vec_env
from rlxf.envs.specs import env_id_of, is_other_version
from tests.agents.decision_transformer.worlds import K

VERSION = "the data are from CartPole-v1, but the agent acts in CartPole-v0"


def version_warnings(work):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(each.message) for each in caught if "another version" in str(each.message)]


def agent_of(data, **changes):
    return DecisionTransformer(data, context_length=K, device="cpu", **changes)


def test_another_version_warns_once(cartpole):
    agent = agent_of(cartpole)

    def work():
        evaluate(agent, "CartPole-v0", 2, target_returns=[9.0])

    (message,) = version_warnings(work)
    assert message.startswith(VERSION)
    assert version_warnings(work) == []


def test_the_same_version_does_not_warn(cartpole):
    agent = agent_of(cartpole)
    assert version_warnings(lambda: evaluate(agent, "CartPole-v1", 2, target_returns=[9.0])) == []
    assert version_warnings(lambda: evaluate(agent, episodes=2, target_returns=[9.0])) == []


def test_online_fine_tuning_in_another_version_warns_once(cartpole):
    agent = agent_of(cartpole, objective=MaximumEntropy())
    online = {"n_envs": 2, "round_steps": 4, "round_updates": 1}
    assert len(version_warnings(lambda: agent.learn_online(4, 9.0, "CartPole-v0", **online))) == 1


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ("Walker2d-v4", "Walker2d-v5", True),
        ("Walker2d-v5", "Walker2d-v5", False),
        ("Walker2d-v4", "Hopper-v5", False),
        ("a/Walker2d-v4", "Walker2d-v5", False),
        ("Walker2d", "Walker2d-v5", True),
    ],
)
def test_is_other_version(one, other, differ):
    assert is_other_version(one, other) is differ


def test_env_id_of():
    assert env_id_of(make_vec_env("CartPole-v1", 2)) == "CartPole-v1"
    assert env_id_of(make_vec_env("rlxf/TMaze-v0", 2)) == "rlxf/TMaze-v0"


def test_env_id_of_an_environment_without_spec_is_none():
    env = make_vec_env("CartPole-v1", 1)
    env.envs[0].unwrapped.spec = None
    env.envs = [env.envs[0].unwrapped]
    assert env_id_of(env) is None
    assert isinstance(env.envs[0], gymnasium.Env)
