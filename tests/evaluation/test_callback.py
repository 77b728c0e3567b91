"""Evaluation during a training of SB3's PPO."""

import inspect
import json
import random

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecNormalize

from rlxf.evaluation import EvaluationCallback, evaluate
from tests.evaluation.askable import ActionRewardEnv
from tests.evaluation.tasks import Countdown, vec


def learner(env) -> PPO:
    return PPO("MlpPolicy", env, n_steps=8, batch_size=8, n_epochs=1, seed=0, device="cpu")


def test_evaluates_at_intervals_of_steps_over_all_environments():
    callback = EvaluationCallback(Countdown(4), episodes=2, every_steps=10)
    learner(vec(Countdown(3), Countdown(3), Countdown(3))).learn(48, callback)
    assert list(callback.reports) == [12, 21, 30, 42]
    assert all(report.returns.tolist() == [10.0, 10.0] for report in callback.reports.values())


def test_continues_with_a_continued_training():
    callback = EvaluationCallback(Countdown(4), episodes=1, every_steps=10)
    agent = learner(vec(Countdown(3))).learn(16, callback)
    agent.learn(16, callback, reset_num_timesteps=False)
    assert list(callback.reports) == [10, 20, 30]


def test_logs_under_the_tags_of_the_report(tmp_path):
    callback = EvaluationCallback(Countdown(4), episodes=2, every_steps=8)
    agent = learner(vec(Countdown(3)))
    agent.set_logger(configure(str(tmp_path), ["json"]))
    agent.learn(8, callback)
    logged = json.loads((tmp_path / "progress.json").read_text().splitlines()[0])
    assert callback.reports[8].scalars().items() <= logged.items()
    assert logged["time/total_timesteps"] == 8


def test_normalization_statistics_are_those_of_the_training():
    train_env, eval_env = VecNormalize(vec(Countdown(9))), VecNormalize(vec(Countdown(4)))
    callback = EvaluationCallback(eval_env, episodes=1, every_steps=32)
    learner(train_env).learn(32, callback)
    assert (eval_env.obs_rms.mean == train_env.obs_rms.mean).all()
    assert eval_env.obs_rms.count == train_env.obs_rms.count


class Learner(BaseAlgorithm):
    """Algorithm without learning, with a given performance at each step; its files have its step."""

    def __init__(self, performance):
        self.performance, self.num_timesteps, self.env = performance, 0, None
        self.observation_space = self.action_space = None
        self._vec_normalize_env = None
        self._logger = configure(None, [])

    def _setup_model(self): ...

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        return observation["return_to_go"] * self.performance[self.num_timesteps - 1], None

    def save(self, path):
        path.write_text(str(self.num_timesteps))

    def learn(self, steps, callback):
        callback.init_callback(self)
        callback.on_training_start({}, {})
        for self.num_timesteps in range(1, steps + 1):
            callback.on_step()


def test_best_agent_by_the_first_target_is_saved(tmp_path):
    best = tmp_path / "best.zip"
    callback = EvaluationCallback(
        vec(ActionRewardEnv()), 1, every_steps=1, target_returns=[0.2, 0.1], n_envs=1, best_path=best
    )
    Learner([0.2, 0.9, 0.5, 0.9, 0.1]).learn(5, callback)
    assert callback.best_step == max(callback.reports, key=lambda step: callback.reports[step].mean) == 2
    assert best.read_text() == "2"


def test_on_new_best_is_called_for_each_new_best():
    best_means = []
    callback = EvaluationCallback(
        vec(ActionRewardEnv()),
        1,
        1,
        target_returns=[0.2],
        on_new_best=lambda: best_means.append(callback.best),
    )
    Learner([0.2, 0.9, 0.5, 0.95]).learn(4, callback)
    assert best_means == sorted(best_means)
    assert len(best_means) == 3
    assert callback.best == best_means[-1] == callback.last.first.mean


class Noisy(Countdown):
    """Environment that draws from every global generator."""

    def step(self, action):
        random.random(), np.random.random(), torch.rand(())  # noqa: NPY002
        return super().step(action)


@pytest.mark.parametrize("deterministic", [True, False])
def test_evaluation_does_not_change_the_training(deterministic):
    """The environment and the policy draw from the generators that the training uses."""
    results = []
    for callbacks in ([], [EvaluationCallback(Noisy(4), 2, every_steps=5, deterministic=deterministic)]):
        agent = learner(vec(Countdown(3)))
        agent.learn(32, callbacks)
        results.append((agent.policy.state_dict(), random.getstate(), np.random.random()))  # noqa: NPY002
        random.seed(0)
    (expected, *expected_generators), (weights, *generators) = results
    assert all(torch.equal(expected[name], weights[name]) for name in expected)
    assert generators == expected_generators


def test_nothing_is_saved_without_a_path():
    callback = EvaluationCallback(vec(ActionRewardEnv()), 1, every_steps=2, target_returns=[0.2])
    Learner([0.2, 0.9]).learn(2, callback)
    assert callback.best_step == 2


def test_default_seed_differs_from_that_of_evaluate():
    """The best agent is thus selected and evaluated on different episodes."""
    callback_seed = inspect.signature(EvaluationCallback).parameters["seed"].default
    evaluate_seed = inspect.signature(evaluate).parameters["seed"].default
    assert abs(callback_seed - evaluate_seed) > 10_000


@pytest.mark.parametrize("given", [{"episodes": 0}, {"every_steps": -1}])
def test_arguments_less_than_one_raise(given):
    name, value = next(iter(given.items()))
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        EvaluationCallback(Countdown(), **given)
