"""Tests of environments: all spaces from recording to evaluation, and the warning for another version."""

import warnings
from dataclasses import replace
from itertools import product

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box
from stable_baselines3.common.callbacks import EvalCallback

from rlxf import DecisionTransformer, collect, evaluate
from rlxf.agents.decision_transformer import MaximumEntropy, MaxReturn, QRegularized, decision_transformer
from rlxf.data import DatasetError, load_trajectories
from rlxf.envs import ReturnToGo, make_vec_env
from rlxf.envs.specs import env_id_of
from rlxf.training import CheckpointFolder, CheckpointWriter
from rlxf.utils.env_ids import is_other_version
from tests.agents.decision_transformer.worlds import K
from tests.agents.trainings import StopAt
from tests.datasets import CHOICE, random_episodes, record
from tests.envs.small_envs import ACTIONS, OBSERVATIONS, any_space_env

ID = "test/spaces-v0"
WORLDS = [
    *product([name for name in OBSERVATIONS if name != "other words"], ["Discrete from 1"]),
    *product(["nested Dict"], ACTIONS),
]
TINY = {"context_length": 3, "core": decision_transformer(width=8, layers=1), "seed": 0, "device": "cpu"}


@pytest.fixture(autouse=True)
def _root(minari_root):
    return minari_root


def trained(env, **changes):
    collect(None, env, ID, episodes=4, seed=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "observation.* is text")
        return DecisionTransformer(ID, trust=True, **(TINY | changes)).learn(2)


@pytest.mark.parametrize("spaces", WORLDS, ids=", ".join)
def test_recorded_datasets_can_be_trained_on_and_evaluated(spaces, tmp_path):
    agent = trained(any_space_env(*spaces))
    agent.save(tmp_path / "agent.zip")
    loaded = DecisionTransformer.load(tmp_path / "agent.zip", device="cpu")
    targets = [agent.return_range[1]]
    reports = [
        evaluate(agent, episodes=5, n_envs=2, target_returns=targets),
        evaluate(loaded, any_space_env(*spaces), episodes=5, target_returns=targets),
    ]
    for report in reports:
        assert np.isfinite(report.achieved).all()


@pytest.mark.parametrize("observations", [name for name in OBSERVATIONS if name != "other words"])
def test_environment_and_dataset_have_bitwise_equal_observations(observations):
    agent = trained(any_space_env(observations))
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
    collect(None, any_space_env("MiniGrid's"), ID, episodes=2)
    with pytest.warns(UserWarning, match=r"^observation\['mission'\] of the dataset is text") as warned:
        agent = DecisionTransformer(ID, **TINY).learn(2)
    assert len(warned) == 1
    assert agent.trajectories.observations.shape[1] == 4 + 7 * 7 * 3
    sweep = evaluate(agent, any_space_env("other words"), episodes=2, target_returns=[agent.return_range[1]])
    assert np.isfinite(sweep.achieved).all()


@pytest.mark.parametrize("actions", ["Discrete from 1", "MultiBinary"])
def test_online_fine_tuning(actions):
    agent = trained(any_space_env("Tuple in a Dict", actions), objective=MaximumEntropy())
    agent.learn_online(16, target_return=5.0, n_envs=2, round_steps=8, round_updates=1)
    assert agent.num_timesteps == 16


@pytest.mark.parametrize("observations", ["Tuple in a Dict", "nested Dict", "MiniGrid's"])
def test_online_fine_tuning_with_predicted_returns_takes_nested_observations(observations, tmp_path):
    """Checkpoints hold the last observation, which has no wrapper here, without its text.

    The episodes continue without a reset.
    """
    options = {"objective": QRegularized(hidden_sizes=(8,)), "conditioning": MaxReturn()}
    online = {"n_envs": 2, "round_steps": 8, "round_updates": 1}
    agent = trained(any_space_env(observations), **options)
    agent.save(tmp_path / "agent.zip")
    saving = CheckpointWriter(CheckpointFolder(tmp_path / "run"), 0)
    agent.learn_online(16, callback=[saving, StopAt(8)], **online)
    assert agent.num_timesteps == 8
    resumed = trained_again(tmp_path / "agent.zip")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the environments are reset")
        resumed.learn_online(16, resume_from=tmp_path / "run", **online)
    assert resumed.num_timesteps == 16


def trained_again(path):
    """Load an agent with its dataset."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "observation.* is text")
        return DecisionTransformer.load(path, dataset=ID, device="cpu", trust=True)


def test_discrete_actions_with_a_start_are_preserved():
    """The dataset contains only the second of two actions that are counted from 1."""
    collect(ConstantAgent(2), any_space_env(actions="Discrete from 1"), ID, episodes=4)
    agent = DecisionTransformer(ID, **(TINY | {"learning_rate": 0.1, "warmup_updates": 1})).learn(10)
    sweep = evaluate(agent, any_space_env(actions="Discrete from 1"), episodes=2, target_returns=[8.0])
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


def conditioned(env_id):
    return ReturnToGo(make_vec_env(env_id, 2), 9.0)


def eval_callback(env_id):
    return EvalCallback(conditioned(env_id), n_eval_episodes=1, eval_freq=10, verbose=0, warn=False)


def train_with_environment_of_data(agent, callbacks):
    agent.set_env(conditioned("CartPole-v1"))
    agent.learn(1, callbacks)


def fine_tune(agent, callbacks):
    agent.learn_online(4, 9.0, "CartPole-v1", callback=callbacks, n_envs=2, round_steps=4, round_updates=1)


@pytest.mark.parametrize(
    "learn",
    [lambda agent, callbacks: agent.learn(1, callbacks), train_with_environment_of_data, fine_tune],
    ids=["without environment", "with environment", "online"],
)
def test_the_environment_of_every_eval_callback_is_compared(cartpole, learn):
    agent = agent_of(cartpole, objective=MaximumEntropy())
    same, other = eval_callback("CartPole-v1"), eval_callback("CartPole-v0")
    assert version_warnings(lambda: learn(agent, [same])) == []
    (message,) = version_warnings(lambda: learn(agent, [same, other]))
    assert message.startswith(VERSION)


def test_an_eval_callback_with_other_spaces_is_refused_before_training(cartpole):
    agent = agent_of(cartpole)
    with pytest.raises(DatasetError, match="does not fit"):
        agent.learn(1, [eval_callback("CartPole-v1"), eval_callback("Acrobot-v1")])
    assert agent.num_timesteps == 0


@pytest.mark.parametrize(
    "env",
    [
        lambda: gymnasium.make("CartPole-v0"),
        lambda: gymnasium.make_vec("CartPole-v0", 2, vectorization_mode="sync"),
        lambda: gymnasium.make_vec("CartPole-v0", 2, vectorization_mode="vector_entry_point"),
        lambda: make_vec_env("CartPole-v0", 2),
        lambda: conditioned("CartPole-v0"),
    ],
    ids=["Env", "SyncVectorEnv", "VectorEnv", "VecEnv", "ReturnToGo"],
)
def test_environments_of_all_kinds_are_compared(cartpole, env):
    agent = agent_of(cartpole)
    assert len(version_warnings(lambda: evaluate(agent, env(), 2, target_returns=[9.0]))) == 1


def test_set_env_of_another_version_warns(cartpole):
    assert len(version_warnings(lambda: agent_of(cartpole).set_env(conditioned("CartPole-v0")))) == 1
    assert len(version_warnings(lambda: agent_of(cartpole, env=conditioned("CartPole-v0")))) == 1


def test_recording_in_another_version_warns(cartpole):
    agent = agent_of(cartpole)

    def work(dataset_id, env_id):
        return lambda: collect(agent, env_id, dataset_id, 2, target_returns=[9.0], n_envs=2)

    assert version_warnings(work("test/same-v0", "CartPole-v1")) == []
    assert len(version_warnings(work("test/other-v0", "CartPole-v0"))) == 1


def recorded(dataset_id, env_id, **changes):
    spec = replace(gymnasium.spec(env_id), **changes)
    spaces = gymnasium.make("CartPole-v1").observation_space, CHOICE
    record(random_episodes((9, 3), Box(-1, 1, (4,), np.float32)), dataset_id, *spaces, env=spec)
    return dataset_id


def test_joined_data_of_two_versions_warn_before_training_and_in_either_version(minari_root):
    ids = [recorded("test/old-v0", "CartPole-v0"), recorded("test/new-v0", "CartPole-v1")]
    with pytest.warns(UserWarning, match="test/old-v0 was recorded in CartPole-v0, but test/new-v0 in Cart"):
        data = load_trajectories(ids)
    assert data.env_ids == ("CartPole-v0", "CartPole-v1")
    for env_id, other in (data.env_ids, data.env_ids[::-1]):
        agent = agent_of(data)
        (message,) = version_warnings(lambda: evaluate(agent, env_id, 2, target_returns=[9.0]))  # noqa: B023
        assert f"acts in {env_id}, another version of {other}" in message


def test_joined_data_with_different_arguments_are_compared(minari_root):
    """They have no common spec, but the same id."""
    ids = [
        recorded("test/long-v0", "CartPole-v1"),
        recorded("test/short-v0", "CartPole-v1", kwargs={"sutton_barto_reward": True}),
    ]
    data = load_trajectories(ids)
    assert data.env_spec is None
    agent = agent_of(data)
    with pytest.raises(
        ValueError, match=r"short-v0 have different descriptions .* \(CartPole-v1\): pass one"
    ):
        evaluate(agent, episodes=2, target_returns=[9.0])
    assert version_warnings(lambda: evaluate(agent, "CartPole-v1", 2, target_returns=[9.0])) == []
    assert len(version_warnings(lambda: evaluate(agent, "CartPole-v0", 2, target_returns=[9.0]))) == 1


def test_the_recorded_environment_counts_not_that_of_evaluations(cartpole):
    data = replace(cartpole, eval_env_spec=gymnasium.spec("CartPole-v0"))
    agent = agent_of(data)
    assert len(version_warnings(lambda: evaluate(agent, episodes=2, target_returns=[9.0]))) == 1


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ("Walker2d-v4", "Walker2d-v5", True),
        ("Walker2d-v5", "Walker2d-v5", False),
        ("Walker2d-v4", "Hopper-v5", False),
        ("a/Walker2d-v4", "Walker2d-v5", False),
        ("Walker2d", "Walker2d-v5", True),
        ("", "Walker2d-v5", False),
        ("no id!", "Walker2d-v5", False),
        ("Walker2d-v" + "1" * 5000, "Walker2d-v5", False),
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
