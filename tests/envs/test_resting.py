"""Environments that rest: nothing happens in them, and nothing changes for the others."""

import gymnasium
import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv

from rlxf.envs import make_vec_env
from rlxf.envs.resting import awake_at_the_end, rest
from rlxf.evaluation import evaluate
from tests.evaluation.tasks import Countdown, Idle


class Stepped(gymnasium.Wrapper):
    """Counts its steps."""

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


def test_at_rest_nothing_happens(env):
    before = env.reset()
    rest(env, [1])
    for _ in range(5):
        seen, rewards, dones, _ = env.step(np.ones(3, int))
        assert np.array_equal(seen[1], before[1])
        assert (rewards[1], dones[1]) == (0.0, False)
    assert steps_of(env) == [5, 0, 5]
    assert not np.array_equal(seen[0], before[0])


def test_the_others_play_as_if_nobody_rested(env):
    awake = make_vec_env("CartPole-v1", 3, seed=0)
    assert np.array_equal(env.reset(), awake.reset())
    rest(env, [0])
    for _ in range(30):  # episodes end meanwhile
        ours, theirs = env.step(np.ones(3, int)), awake.step(np.ones(3, int))
        for one, other in zip(ours[:3], theirs[:3], strict=True):
            assert np.array_equal(one[1:], other[1:])
    awake.close()


def test_a_reset_wakes_all(env):
    env.reset()
    rest(env, [0, 2])
    env.reset()
    env.step(np.zeros(3, int))
    assert steps_of(env) == [1, 1, 1]


def test_what_cannot_rest_plays_on():
    env = DummyVecEnv([lambda: Stepped(gymnasium.make("CartPole-v1"))])
    env.reset()
    rest(env, [0])
    env.step(np.zeros(1, int))
    assert steps_of(env) == [1]


def test_an_evaluation_steps_nobody_who_has_played_enough(env):
    report = evaluate(Idle(), env, 7)
    assert sum(steps_of(env)) == report.lengths.sum()


def test_all_are_awake_after_an_evaluation(env):
    """Whoever trains in them may go on without a reset."""
    evaluate(Idle(), env, 7)
    before = steps_of(env)
    env.step(np.ones(3, int))
    assert steps_of(env) == [steps + 1 for steps in before]


def test_all_are_awake_after_an_evaluation_that_broke_off(env):
    class Tired(Idle):
        def predict(self, *args, **kwargs):
            if len(set(steps_of(env))) > 1:  # one rests
                raise KeyboardInterrupt
            return super().predict(*args, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        evaluate(Tired(), env, 7)
    before = steps_of(env)
    env.step(np.ones(3, int))
    assert steps_of(env) == [steps + 1 for steps in before]


def test_an_error_is_told_even_if_none_can_be_woken(env, monkeypatch):
    def fails(*asked):
        raise ValueError("nobody answers")

    monkeypatch.setattr(env, "env_method", fails)
    with pytest.raises(KeyboardInterrupt), awake_at_the_end(env):
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="nobody answers"), awake_at_the_end(env):
        pass


def test_an_environment_by_itself_is_left_awake():
    env = Stepped(Countdown(3))
    evaluate(Idle(), env, 2)
    env.reset()
    env.step(env.action_space.sample())
    assert env.steps == 7
