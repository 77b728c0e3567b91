"""Paused environments: they are not stepped, and the other environments are unaffected."""

import gymnasium
import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv

from rlxf.envs import make_vec_env
from rlxf.envs.stateful_env import pause_envs, resume_envs_at_exit
from rlxf.evaluation import evaluate
from tests.evaluation.tasks import Countdown, Idle


class Stepped(gymnasium.Wrapper):
    """Wrapper that counts its steps."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self.steps = 0

    def step(self, action):
        self.steps += 1
        return self.env.step(action)


def steps_of(env):
    return env.get_attr("steps")


@pytest.fixture
def env():
    made = make_vec_env("CartPole-v1", 3, seed=0, wrapper_class=Stepped)
    yield made
    made.close()


def test_paused_environment_is_not_stepped(env):
    before = env.reset()
    pause_envs(env, [1])
    for _ in range(5):
        observations, rewards, dones, _ = env.step(np.ones(3, int))
        assert np.array_equal(observations[1], before[1])
        assert (rewards[1], dones[1]) == (0.0, False)
    assert steps_of(env) == [5, 0, 5]
    assert not np.array_equal(observations[0], before[0])


def test_pausing_does_not_change_the_other_environments(env):
    reference = make_vec_env("CartPole-v1", 3, seed=0)
    assert np.array_equal(env.reset(), reference.reset())
    pause_envs(env, [0])
    for _ in range(30):  # episodes end meanwhile
        actual, expected = env.step(np.ones(3, int)), reference.step(np.ones(3, int))
        for one, other in zip(actual[:3], expected[:3], strict=True):
            assert np.array_equal(one[1:], other[1:])
    reference.close()


def test_reset_resumes_all_environments(env):
    env.reset()
    pause_envs(env, [0, 2])
    env.reset()
    env.step(np.zeros(3, int))
    assert steps_of(env) == [1, 1, 1]


def test_environments_without_the_wrapper_are_stepped():
    env = DummyVecEnv([lambda: Stepped(gymnasium.make("CartPole-v1"))])
    env.reset()
    pause_envs(env, [0])
    env.step(np.zeros(1, int))
    assert steps_of(env) == [1]


def test_evaluation_pauses_environments_with_enough_episodes(env):
    report = evaluate(Idle(), env, 7)
    assert sum(steps_of(env)) == report.lengths.sum()


def test_all_environments_are_resumed_after_an_evaluation(env):
    """A training in the same environments can continue without a reset."""
    evaluate(Idle(), env, 7)
    before = steps_of(env)
    env.step(np.ones(3, int))
    assert steps_of(env) == [steps + 1 for steps in before]


def test_all_environments_are_resumed_after_an_interrupted_evaluation(env):
    class Interrupting(Idle):
        def predict(self, *args, **kwargs):
            if len(set(steps_of(env))) > 1:  # an environment is paused
                raise KeyboardInterrupt
            return super().predict(*args, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        evaluate(Interrupting(), env, 7)
    before = steps_of(env)
    env.step(np.ones(3, int))
    assert steps_of(env) == [steps + 1 for steps in before]


def test_original_error_is_raised_even_if_resuming_fails(env, monkeypatch):
    def fails(*arguments):
        raise ValueError("no reply")

    monkeypatch.setattr(env, "env_method", fails)
    with pytest.raises(KeyboardInterrupt), resume_envs_at_exit(env):
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="no reply"), resume_envs_at_exit(env):
        pass


def test_single_environment_is_resumed_after_an_evaluation():
    env = Stepped(Countdown(3))
    evaluate(Idle(), env, 2)
    env.reset()
    env.step(env.action_space.sample())
    assert env.steps == 7
