"""Positions that end, and episodes that are longer: refused before training."""

import re

import pytest
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.vec_env import DummyVecEnv

from rlxf import GTrXLPPO, evaluate
from rlxf.attention import XL, LearnedAbsolute, Multiplicative, RoPE, TransformerSpec, Tupe, Window
from rlxf.envs import make_vec_env

LIMIT = 200
"""Steps of an episode of MountainCar-v0, which random actions never end before."""


def agent(position, env="MountainCar-v0") -> GTrXLPPO:
    core = TransformerSpec(
        width=8, heads=2, layers=1, position=position, pattern=Window(5), memory=XL(4), feed_forward=8
    )
    sizes = {"n_envs": 1, "n_steps": 224, "segment_length": 8, "batch_size": 224, "n_epochs": 1}
    return GTrXLPPO("MlpGTrXLPolicy", env, core=core, **sizes)


@pytest.mark.parametrize("position", [LearnedAbsolute, Multiplicative, Tupe])
def test_episodes_that_are_longer_are_refused_at_once(position):
    told = f"max_episode_steps={LIMIT} steps.* {LIMIT + 1} observations.* only {LIMIT} positions"
    with pytest.raises(ValueError, match=told):
        agent(position(max_length=LIMIT))


def test_what_is_accepted_reaches_the_end_of_an_episode():
    """The last observation of a truncated episode has a position, too."""
    model = agent(LearnedAbsolute(LIMIT + 1)).learn(224)
    assert model.num_timesteps == 224


def test_another_environment_is_checked_when_it_is_learned_from():
    env = make_vec_env("MountainCar-v0", 1)
    model = agent(LearnedAbsolute(LIMIT + 1), env)
    model.set_env(DummyVecEnv([lambda: TimeLimit(env.envs[0].unwrapped, 500)]))
    with pytest.raises(ValueError, match=re.escape("max_episode_steps=500")):
        model.learn(224)


def test_relative_positions_have_no_end():
    assert agent(RoPE()).core.position.max_positions is None


def test_evaluation_in_longer_episodes_is_refused_before_the_first_step():
    env = make_vec_env("MountainCar-v0", 1)
    model = agent(LearnedAbsolute(LIMIT + 1), env)
    longer = DummyVecEnv([lambda: TimeLimit(env.envs[0].unwrapped, 500)])
    longer.step_async = None  # a step would raise TypeError
    with pytest.raises(ValueError, match=re.escape("max_episode_steps=500")):
        evaluate(model, longer, episodes=1)
