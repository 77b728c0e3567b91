"""Warnings about wrappers of Gymnasium that normalize observations or change rewards."""

import warnings

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import (
    ClipReward,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    TimeLimit,
    TransformReward,
    vector,
)
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from rlxf import evaluate
from rlxf.envs import Workers, as_vec_env, make_vec_env
from rlxf.envs.gymnasium_wrappers import warn_of_changed_rewards, warn_of_unsaved_statistics
from tests.agents.gtrxl.worlds import small_agent

ID = "CartPole-v1"


def scaled(env):
    return TransformReward(env, lambda reward: 0.1 * reward)


def vec_of(*wrappers, make=lambda: gymnasium.make(ID)):
    """Return a vector environment of one environment in wrappers, the innermost first."""
    env = make()
    for wrapper in wrappers:
        env = wrapper(env)
    return DummyVecEnv([lambda: env])


def vector_env():
    return SyncVectorEnv([lambda: gymnasium.make(ID)] * 2)


NORMALIZED = {
    "Env": lambda: NormalizeObservation(gymnasium.make(ID)),
    "inside": lambda: TimeLimit(NormalizeObservation(gymnasium.make(ID)), 9),
    "copies": lambda: make_vec_env(ID, 2, wrapper_class=NormalizeObservation),
    "processes": lambda: make_vec_env(ID, 2, wrapper_class=NormalizeObservation, workers=Workers(1)),
    "VectorEnv": lambda: vector.NormalizeObservation(vector_env()),
}
RAW = {
    "Env": lambda: gymnasium.make(ID),
    "VecNormalize": lambda: VecNormalize(make_vec_env(ID, 2)),
    "processes": lambda: make_vec_env(ID, 2, workers=Workers(1)),
    "VectorEnv": vector_env,
}


@pytest.mark.parametrize("make", NORMALIZED.values(), ids=NORMALIZED)
def test_training_warns_of_statistics_that_no_file_holds(make):
    agent = small_agent(make())
    with pytest.warns(
        UserWarning, match=r"NormalizeObservation, whose statistics are not saved .*save_normal"
    ):
        agent.learn(0)
    agent.env.close()


class Foreign(VecEnv):
    """Vector environment that does not report its wrappers, and whose ``envs`` is a number."""

    def __init__(self):
        self.envs = 2
        space = gymnasium.spaces.Discrete(2)
        super().__init__(self.envs, space, space)

    def env_is_wrapped(self, wrapper_class, indices=None):
        raise NotImplementedError

    def get_attr(self, attr_name, indices=None):
        raise AttributeError(attr_name)

    reset = step_async = step_wait = close = set_attr = env_method = env_is_wrapped


def test_environments_that_do_not_report_their_wrappers_do_not_warn():
    env = Foreign()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unsaved_statistics(env)
        warn_of_changed_rewards(env)


@pytest.mark.parametrize("make", RAW.values(), ids=RAW)
def test_training_without_these_statistics_does_not_warn(make):
    agent = small_agent(make())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*NormalizeObservation")
        agent.learn(0)
    agent.env.close()


CHANGED = {
    "NormalizeReward": vec_of(NormalizeReward),
    "TransformReward": vec_of(scaled, Monitor),
    "outer wrappers": vec_of(lambda env: ClipReward(env, 0, 0.5), lambda env: TimeLimit(env, 9)),
    "no id": vec_of(scaled, Monitor, make=CartPoleEnv),
    "statistics of a VecEnv of Stable-Baselines3": vec_of(RecordEpisodeStatistics, scaled),
}
UNCHANGED = {
    "no wrapper": vec_of(),
    "Monitor inside": vec_of(Monitor, NormalizeReward),
    "statistics inside": as_vec_env(
        SyncVectorEnv([lambda: scaled(RecordEpisodeStatistics(gymnasium.make(ID)))])
    ),
    "statistics of the vector environment": as_vec_env(
        vector.NormalizeReward(vector.RecordEpisodeStatistics(vector_env()))
    ),
    "wrapper_class": make_vec_env(ID, 2, wrapper_class=scaled),
    "part of the task": vec_of(
        make=lambda: gymnasium.make(
            gymnasium.envs.registration.EnvSpec("Scaled-v0", lambda: scaled(CartPoleEnv()))
        )
    ),
}


@pytest.mark.parametrize("env", CHANGED.values(), ids=CHANGED)
def test_returns_of_changed_rewards_warn(env):
    with pytest.warns(
        UserWarning, match=r"sums of the rewards of gymnasium.wrappers.\w+Reward, not of those of"
    ):
        warn_of_changed_rewards(env)


def test_vector_wrappers_warn():
    env = small_agent(vector.NormalizeReward(vector_env())).get_env()
    with pytest.warns(UserWarning, match=r"sums of the rewards of gymnasium.wrappers.NormalizeReward"):
        warn_of_changed_rewards(env)


@pytest.mark.parametrize("env", UNCHANGED.values(), ids=UNCHANGED)
def test_returns_of_the_task_do_not_warn(env):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_changed_rewards(env)


def test_an_evaluation_warns_once():
    env = NormalizeReward(gymnasium.make(ID, max_episode_steps=5))
    agent = small_agent(ID)
    with pytest.warns(UserWarning, match="NormalizeReward, not of those of the task") as caught:
        evaluate(agent, env, 2)
    assert sum("NormalizeReward" in str(each.message) for each in caught) == 1
