"""Evaluations that would be wrong or say little without a word."""

import warnings

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

from rlxf import GTrXLPPO, collect, evaluate
from rlxf.agents.gtrxl import gtrxl
from rlxf.envs import make_vec_env
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.training import load_normalizer, save_normalizer
from tests.evaluation.askable import Obedient, Purse
from tests.evaluation.tasks import Countdown, Idle, vec

SIZES = {"n_steps": 16, "segment_length": 4, "batch_size": 16, "seed": 3, "device": "cpu"}


def told(play, word):
    """Where it was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        play()
    return [each.filename for each in caught if word in str(each.message)]


def learned(env):
    core = gtrxl(4, width=16, layers=1, heads=2)
    return GTrXLPPO("MlpGTrXLPolicy", env, core=core, **SIZES).learn(32)


def pendulum():
    return make_vec_env("Pendulum-v1", 2, seed=0)


@pytest.fixture(scope="module")
def normalised(tmp_path_factory):
    """Files of an agent that learned under a ``VecNormalize``, and of its statistics."""
    folder = tmp_path_factory.mktemp("normalised")
    env = VecNormalize(pendulum())
    learned(env).save(folder / "agent.zip")
    save_normalizer(folder / "normalizer.zip", env)
    return folder


def raw(play):
    return told(play, "VecNormalize")


def test_statistics_are_missing(normalised):
    agent = GTrXLPPO.load(normalised / "agent.zip", device="cpu")
    assert raw(lambda: evaluate(agent, "Pendulum-v1", 2, n_envs=2)) == [__file__]
    agent = GTrXLPPO.load(normalised / "agent.zip", env=pendulum(), device="cpu")
    assert len(raw(lambda: evaluate(agent, episodes=2))) == 1


def test_statistics_are_there(normalised):
    def env():
        return load_normalizer(normalised / "normalizer.zip", pendulum())

    agent = GTrXLPPO.load(normalised / "agent.zip", device="cpu")
    assert raw(lambda: evaluate(agent, env(), 2)) == []
    agent = GTrXLPPO.load(normalised / "agent.zip", env=env(), device="cpu")
    assert raw(lambda: evaluate(agent, "Pendulum-v1", 2, n_envs=2)) == []


@pytest.mark.parametrize(
    "env", [pendulum, lambda: VecNormalize(pendulum(), norm_obs=False)], ids=["raw", "rewards alone"]
)
def test_observations_were_raw(tmp_path, env):
    learned(env()).save(tmp_path / "agent")
    agent = GTrXLPPO.load(tmp_path / "agent", device="cpu")
    assert raw(lambda: evaluate(agent, "Pendulum-v1", 2, n_envs=2)) == []


def test_what_is_recorded_is_played_by_the_same_rule(normalised, minari_root):
    agent = GTrXLPPO.load(normalised / "agent.zip", device="cpu")
    assert len(raw(lambda: collect(agent, pendulum(), "test/raw-v0", episodes=2))) >= 1


def test_learning_goes_on_with_raw_observations(normalised):
    agent = GTrXLPPO.load(normalised / "agent.zip", env=pendulum(), device="cpu")
    assert len(raw(lambda: agent.learn(32))) == 1
    assert raw(lambda: agent.learn(32)) == []


def test_one_episode_has_no_interval():
    assert told(lambda: evaluate(Idle(), vec(Countdown(3)), 1), "interval") == [__file__]
    assert told(lambda: evaluate(Idle(), vec(Countdown(3)), 2), "interval") == []


class Unasked(Idle):
    """Is known to read vectors."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)


def test_targets_are_for_agents_that_read_them():
    with pytest.raises(ValueError, match=r"conditioned on a return, .*which Unasked is not: leave"):
        evaluate(Unasked(), vec(Countdown(3)), 2, target_returns=[1.0])
    agent = GTrXLPPO("MlpGTrXLPolicy", "CartPole-v1", n_envs=8, device="cpu")
    with pytest.raises(ValueError, match=r"conditioned on a return, .*which GTrXLPPO is not"):
        evaluate(agent, "CartPole-v1", 2, target_returns=[1.0])


def test_any_agent_that_reads_targets_may_be_asked():
    class Conditioned(Obedient):
        return_range = None
        observation_space = ReturnToGo(vec(Purse()), 1.0).observation_space

    assert evaluate(Conditioned(), vec(Purse()), 2, target_returns=[1.0]).targets.tolist() == [1.0]
