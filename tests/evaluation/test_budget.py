"""Tests of the cost of evaluations and videos during a training."""

import gymnasium
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor

from rlxf.evaluation import EvaluationCallback, callback
from tests.evaluation.tasks import Countdown, vec


def learn(steps, callback, length=3):
    agent = PPO(
        "MlpPolicy", vec(Monitor(Countdown(length))), n_steps=8, batch_size=8, n_epochs=1, device="cpu"
    )
    return agent.learn(steps, callback)


def test_evaluations_are_left_out_beyond_the_budget():
    """An evaluation has 2 episodes of 4 steps. With half a step per training step, one fits in 16 steps."""
    limited = EvaluationCallback(Countdown(4), episodes=2, every_steps=8, budget=0.5)
    learn(48, limited)
    assert list(limited.reports) == [16, 32, 48]
    assert limited.played == 24
    unlimited = EvaluationCallback(Countdown(4), episodes=2, every_steps=8)
    learn(48, unlimited)
    assert list(unlimited.reports) == [8, 16, 24, 32, 40, 48]


def test_the_first_evaluation_is_expected_to_be_as_long_as_training_episodes():
    """Training episodes have 3 steps, so 2 episodes of 6 steps are expected to fit in 12 steps."""
    limited = EvaluationCallback(Countdown(6), episodes=2, every_steps=8, budget=0.5)
    learn(48, limited)
    assert list(limited.reports) == [16, 48]


def test_the_agent_is_evaluated_once_at_the_end_if_the_budget_is_too_small(tmp_path):
    limited = EvaluationCallback(
        Countdown(4), episodes=2, every_steps=8, budget=0.01, best_path=tmp_path / "best.zip"
    )
    learn(32, limited)
    assert list(limited.reports) == [32]
    assert (limited.best, limited.best_step) == (10.0, 32)
    assert (tmp_path / "best.zip").is_file()


def test_a_resumed_training_has_the_same_budget():
    whole, first, second = (
        EvaluationCallback(Countdown(4), episodes=2, every_steps=8, budget=0.5) for _ in range(3)
    )
    agent = learn(16, first)
    second.load_state(first.state())
    agent.learn(32, second, reset_num_timesteps=False)
    learn(48, whole)
    assert first.reports.keys() | second.reports.keys() == whole.reports.keys()
    assert second.state() == whole.state()


class Clock:
    """Fake clock, which environments advance at each step."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


class Timed(gymnasium.Wrapper):
    """Environment with steps of a given duration."""

    def __init__(self, env, clock, seconds):
        super().__init__(env)
        self.clock, self.seconds = clock, seconds

    def step(self, action):
        self.clock.now += self.seconds
        return super().step(action)


@pytest.mark.parametrize("steps", [64, 640])
def test_evaluations_take_a_tenth_of_the_training_time(monkeypatch, steps):
    """With steps half as long as those of the training and 0.2 of them, the share is a tenth."""
    clock = Clock()
    monkeypatch.setattr(callback, "time", clock)
    every = steps // 10
    limited = EvaluationCallback(Timed(Countdown(4), clock, 0.5), 3, every, budget=0.2)
    PPO("MlpPolicy", vec(Timed(Countdown(3), clock, 1.0)), n_steps=8, batch_size=8, n_epochs=1).learn(
        steps, limited
    )
    assert limited.reports
    assert limited.seconds == limited.played * 0.5
    assert clock.now == steps + limited.seconds
    assert limited.seconds <= 0.1 * steps


def test_an_exception_before_a_step_ends_the_evaluation():
    stopped = EvaluationCallback(Countdown(4), episodes=2, every_steps=8)
    steps = []

    def stop():
        steps.append(None)
        if len(steps) == 3:
            raise InterruptedError

    stopped.on_env_step = stop
    with pytest.raises(InterruptedError):
        learn(32, stopped)
    assert not stopped.reports
    assert len(steps) == 3
