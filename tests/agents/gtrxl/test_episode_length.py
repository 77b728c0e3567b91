"""Episodes with more steps than positions are rejected before training."""

import re

import pytest
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.vec_env import DummyVecEnv

from rlxf import GTrXLPPO, evaluate
from rlxf.attention import XL, LearnedAbsolute, Multiplicative, RoPE, TransformerSpec, Tupe, Window
from rlxf.envs import make_vec_env

LIMIT = 200
"""Length of an episode of MountainCar-v0 with random actions."""


def agent(position, env="MountainCar-v0") -> GTrXLPPO:
    core = TransformerSpec(
        width=8, heads=2, layers=1, position=position, pattern=Window(5), memory=XL(4), feed_forward=8
    )
    sizes = {"n_envs": 1, "n_steps": 224, "segment_length": 8, "batch_size": 224, "n_epochs": 1}
    return GTrXLPPO("MlpGTrXLPolicy", env, core=core, **sizes)


@pytest.mark.parametrize("position", [LearnedAbsolute, Multiplicative, Tupe])
def test_too_long_episodes_are_rejected_in_constructor(position):
    message = f"max_episode_steps={LIMIT} steps.* {LIMIT + 1} observations.* only {LIMIT} positions"
    with pytest.raises(ValueError, match=message):
        agent(position(max_length=LIMIT))


def test_accepted_position_covers_whole_episode():
    """The last observation of a truncated episode also needs a position."""
    model = agent(LearnedAbsolute(LIMIT + 1)).learn(224)
    assert model.num_timesteps == 224


def test_new_environment_is_checked_by_learn():
    env = make_vec_env("MountainCar-v0", 1)
    model = agent(LearnedAbsolute(LIMIT + 1), env)
    model.set_env(DummyVecEnv([lambda: TimeLimit(env.envs[0].unwrapped, 500)]))
    with pytest.raises(ValueError, match=re.escape("max_episode_steps=500")):
        model.learn(224)


def test_relative_positions_are_unlimited():
    assert agent(RoPE()).core.position.max_positions is None


def test_evaluation_rejects_longer_episodes_before_first_step():
    env = make_vec_env("MountainCar-v0", 1)
    model = agent(LearnedAbsolute(LIMIT + 1), env)
    longer = DummyVecEnv([lambda: TimeLimit(env.envs[0].unwrapped, 500)])
    longer.step_async = None  # a step would raise TypeError
    with pytest.raises(ValueError, match=re.escape("max_episode_steps=500")):
        evaluate(model, longer, episodes=1)
