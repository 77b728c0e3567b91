"""Tests of environments: all spaces from recording to evaluation, and the warning for another version."""

import warnings
from itertools import product

import gymnasium
import numpy as np
import pytest

from rlxf import DecisionTransformer, collect, evaluate
from rlxf.agents.decision_transformer import MaximumEntropy, decision_transformer
from rlxf.envs import ReturnToGo, make_vec_env
from rlxf.envs.specs import env_id_of, is_other_version
from tests.agents.decision_transformer.worlds import K
from tests.envs.small_envs import ACTIONS, OBSERVATIONS

ID = "test/spaces-v0"
WORLDS = [
    *product([name for name in OBSERVATIONS if name != "other words"], ["Discrete from 1"]),
    *product(["nested Dict"], ACTIONS),
]
TINY = {"context_length": 3, "core": decision_transformer(width=8, layers=1), "seed": 0, "device": "cpu"}


@pytest.fixture(autouse=True)
def _root(minari_root):
    return minari_root


def world(observations="nested Dict", actions="Discrete"):
    return gymnasium.make("rlxf-test/AnySpace-v0", observations=observations, actions=actions)


def trained(env, **changes):
    collect(None, env, ID, episodes=4, seed=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "observation.* is text")
        return DecisionTransformer(ID, trust=True, **(TINY | changes)).learn(2)


@pytest.mark.parametrize("spaces", WORLDS, ids=", ".join)
def test_recorded_datasets_can_be_trained_on_and_evaluated(spaces, tmp_path):
    agent = trained(world(*spaces))
    agent.save(tmp_path / "agent.zip")
    loaded = DecisionTransformer.load(tmp_path / "agent.zip", device="cpu")
    targets = [agent.return_range[1]]
    reports = [
        evaluate(agent, episodes=5, n_envs=2, target_returns=targets),
        evaluate(loaded, world(*spaces), episodes=5, target_returns=targets),
    ]
    for report in reports:
        assert np.isfinite(report.achieved).all()


@pytest.mark.parametrize("observations", [name for name in OBSERVATIONS if name != "other words"])
def test_environment_and_dataset_have_bitwise_equal_observations(observations):
    agent = trained(world(observations))
    data = agent.trajectories
    env = ReturnToGo(agent.make_env(1), 0.0)
    env.seed(3)
    shown = [env.reset()["observation"]]
    for action in data.actions:
        shown.append(env.step(action[None])[0]["observation"])
    rows, _ = agent.encode({"observation": np.concatenate(shown[:-1])}, data.actions)
    assert rows.dtype == data.observations.dtype == np.float32
    np.testing.assert_array_equal(rows.view(np.int32), np.asarray(data.observations).view(np.int32))


def test_text_is_ignored_with_a_single_warning():
    collect(None, world("MiniGrid's"), ID, episodes=2)
    with pytest.warns(UserWarning, match=r"^observation\['mission'\] of the dataset is text") as warned:
        agent = DecisionTransformer(ID, **TINY).learn(2)
    assert len(warned) == 1
    assert agent.trajectories.observations.shape[1] == 4 + 7 * 7 * 3
    sweep = evaluate(agent, world("other words"), episodes=2, target_returns=[agent.return_range[1]])
    assert np.isfinite(sweep.achieved).all()


@pytest.mark.parametrize("actions", ["Discrete from 1", "MultiBinary"])
def test_online_fine_tuning(actions):
    agent = trained(world("Tuple in a Dict", actions), objective=MaximumEntropy())
    agent.learn_online(16, target_return=5.0, n_envs=2, round_steps=8, round_updates=1)
    assert agent.num_timesteps == 16


def test_discrete_actions_with_a_start_are_preserved():
    """The dataset contains only the second of two actions that are counted from 1."""
    collect(ConstantAgent(2), world(actions="Discrete from 1"), ID, episodes=4)
    agent = DecisionTransformer(ID, **(TINY | {"learning_rate": 0.1, "warmup_updates": 1})).learn(10)
    sweep = evaluate(agent, world(actions="Discrete from 1"), episodes=2, target_returns=[8.0])
    assert sweep.achieved.tolist() == [8.0]


class ConstantAgent:
    """Agent that repeats an action."""

    def __init__(self, action):
        self.action = action

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        return np.full(len(episode_start), self.action), state


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
