"""An environment of another version than that of the data."""

import warnings

import gymnasium
import pytest

from rlxf import DecisionTransformer, evaluate
from rlxf.agents.decision_transformer import MaximumEntropy
from rlxf.envs import make_vec_env
from rlxf.envs.ids import env_id_of, is_other_version
from tests.agents.decision_transformer.worlds import K

VERSION = "the data are from CartPole-v1, and the agent plays in CartPole-v0"


def told(play):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        play()
    return [str(each.message) for each in caught if "another version" in str(each.message)]


def agent_of(data, **changes):
    return DecisionTransformer(data, context_length=K, device="cpu", **changes)


def test_it_is_told_once(cartpole):
    agent = agent_of(cartpole)

    def play():
        evaluate(agent, "CartPole-v0", 2, target_returns=[9.0])

    (message,) = told(play)
    assert message.startswith(VERSION)
    assert told(play) == []


def test_the_version_of_the_data(cartpole):
    agent = agent_of(cartpole)
    assert told(lambda: evaluate(agent, "CartPole-v1", 2, target_returns=[9.0])) == []
    assert told(lambda: evaluate(agent, episodes=2, target_returns=[9.0])) == []


def test_learning_online_in_another_version(cartpole):
    agent = agent_of(cartpole, objective=MaximumEntropy())
    online = {"n_envs": 2, "round_steps": 4, "round_updates": 1}
    assert len(told(lambda: agent.learn_online(4, 9.0, "CartPole-v0", **online))) == 1


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
def test_versions_of_ids(one, other, differ):
    assert is_other_version(one, other) is differ


def test_the_id_of_environments():
    assert env_id_of(make_vec_env("CartPole-v1", 2)) == "CartPole-v1"
    assert env_id_of(make_vec_env("rlxf/TMaze-v0", 2)) == "rlxf/TMaze-v0"


def test_an_environment_without_id():
    env = make_vec_env("CartPole-v1", 1)
    env.envs[0].unwrapped.spec = None
    env.envs = [env.envs[0].unwrapped]
    assert env_id_of(env) is None
    assert isinstance(env.envs[0], gymnasium.Env)
