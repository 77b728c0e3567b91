"""Warnings about evaluations that would be misleading."""

import warnings
from functools import partial

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

from rlxf import DecisionTransformer, GTrXLPPO, collect, evaluate
from rlxf.agents.decision_transformer import MaxReturn
from rlxf.agents.gtrxl import gtrxl
from rlxf.data import ReferenceScores
from rlxf.envs import make_vec_env
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.training import load_normalizer, save_normalizer
from tests.datasets import ID, record_random
from tests.evaluation.worlds import ActionRewardEnv, Countdown, Idle, TargetFollower, vec

SIZES = {"n_steps": 16, "segment_length": 4, "batch_size": 16, "seed": 3, "device": "cpu"}


def warning_files(play, word):
    """Return the files to which the warnings with the word are attributed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        play()
    return [each.filename for each in caught if word in str(each.message)]


def trained(env):
    core = gtrxl(4, width=16, layers=1, heads=2)
    return GTrXLPPO("MlpGTrXLPolicy", env, core=core, **SIZES).learn(32)


def pendulum():
    return make_vec_env("Pendulum-v1", 2, seed=0)


@pytest.fixture(scope="module")
def normalized(tmp_path_factory):
    """Folder with the files of an agent trained with ``VecNormalize``, and of its statistics."""
    folder = tmp_path_factory.mktemp("normalized")
    env = VecNormalize(pendulum())
    trained(env).save(folder / "agent.zip")
    save_normalizer(folder / "normalizer.zip", env)
    return folder


def normalizer_warnings(play):
    return warning_files(play, "VecNormalize")


def test_missing_statistics_warn(normalized):
    agent = GTrXLPPO.load(normalized / "agent.zip", device="cpu")
    assert normalizer_warnings(lambda: evaluate(agent, "Pendulum-v1", 2, n_envs=2)) == [__file__]
    agent = GTrXLPPO.load(normalized / "agent.zip", env=pendulum(), device="cpu")
    assert len(normalizer_warnings(lambda: evaluate(agent, episodes=2))) == 1


def test_available_statistics_do_not_warn(normalized):
    def env():
        return load_normalizer(normalized / "normalizer.zip", pendulum())

    agent = GTrXLPPO.load(normalized / "agent.zip", device="cpu")
    assert normalizer_warnings(lambda: evaluate(agent, env(), 2)) == []
    agent = GTrXLPPO.load(normalized / "agent.zip", env=env(), device="cpu")
    assert normalizer_warnings(lambda: evaluate(agent, "Pendulum-v1", 2, n_envs=2)) == []


@pytest.mark.parametrize(
    "env",
    [pendulum, lambda: VecNormalize(pendulum(), norm_obs=False)],
    ids=["raw", "only rewards"],
)
def test_training_with_raw_observations_does_not_warn(tmp_path, env):
    trained(env()).save(tmp_path / "agent")
    agent = GTrXLPPO.load(tmp_path / "agent", device="cpu")
    assert normalizer_warnings(lambda: evaluate(agent, "Pendulum-v1", 2, n_envs=2)) == []


@pytest.mark.thorough
def test_collect_warns_of_missing_statistics(normalized, minari_root):
    agent = GTrXLPPO.load(normalized / "agent.zip", device="cpu")
    scores = ReferenceScores(-1000.0, 0.0, "none")  # so that no episodes are played to measure them
    record = partial(collect, agent, pendulum(), "test/raw-v0", episodes=2, reference_scores=scores)
    assert len(normalizer_warnings(record)) >= 1


def test_continued_training_with_raw_observations_warns_once(normalized):
    agent = GTrXLPPO.load(normalized / "agent.zip", env=pendulum(), device="cpu")
    assert len(normalizer_warnings(lambda: agent.learn(32))) == 1
    assert normalizer_warnings(lambda: agent.learn(32)) == []


def test_single_episode_warns():
    assert warning_files(lambda: evaluate(Idle(), vec(Countdown(3)), 1), "interval") == [__file__]
    assert warning_files(lambda: evaluate(Idle(), vec(Countdown(3)), 2), "interval") == []


class Unconditioned(Idle):
    """Agent with a vector as its observation space."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)


def test_targets_for_an_unconditioned_agent_raise():
    with pytest.raises(ValueError, match=r"conditioned on a return, .*got Unconditioned: leave"):
        evaluate(Unconditioned(), vec(Countdown(3)), 2, target_returns=[1.0])
    agent = GTrXLPPO("MlpGTrXLPolicy", "CartPole-v1", n_envs=8, device="cpu")
    with pytest.raises(ValueError, match=r"conditioned on a return, .*got GTrXLPPO"):
        evaluate(agent, "CartPole-v1", 2, target_returns=[1.0])


def test_targets_for_an_agent_that_predicts_the_return_name_its_conditioning(minari_root):
    record_random()
    agent = DecisionTransformer(ID, conditioning=MaxReturn(expectile=0.9), device="cpu")
    with pytest.raises(ValueError, match=r"with conditioning=MaxReturn\(expectile=0.9.*\), which predicts"):
        evaluate(agent, "CartPole-v1", 2, target_returns=[1.0])


def test_targets_for_an_agent_with_the_space_of_return_to_go():
    class Conditioned(TargetFollower):
        return_range = None
        observation_space = ReturnToGo(vec(ActionRewardEnv()), 1.0).observation_space

    assert evaluate(Conditioned(), vec(ActionRewardEnv()), 2, target_returns=[1.0]).targets.tolist() == [1.0]
