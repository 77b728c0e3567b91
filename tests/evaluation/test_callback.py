"""Evaluation while SB3's PPO learns."""

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
from tests.evaluation.askable import Purse
from tests.evaluation.tasks import Countdown, vec


def learner(env) -> PPO:
    return PPO("MlpPolicy", env, n_steps=8, batch_size=8, n_epochs=1, seed=0, device="cpu")


def test_evaluates_every_so_many_steps_of_all_environments():
    callback = EvaluationCallback(Countdown(4), episodes=2, every_steps=10)
    learner(vec(Countdown(3), Countdown(3), Countdown(3))).learn(48, callback)
    assert list(callback.reports) == [12, 21, 30, 42]
    assert all(report.returns.tolist() == [10.0, 10.0] for report in callback.reports.values())


def test_goes_on_where_training_goes_on():
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


def test_normalised_observations_are_those_of_training():
    trained_in, evaluated_in = VecNormalize(vec(Countdown(9))), VecNormalize(vec(Countdown(4)))
    callback = EvaluationCallback(evaluated_in, episodes=1, every_steps=32)
    learner(trained_in).learn(32, callback)
    assert (evaluated_in.obs_rms.mean == trained_in.obs_rms.mean).all()
    assert evaluated_in.obs_rms.count == trained_in.obs_rms.count


class Learner(BaseAlgorithm):
    """Learns nothing: a dial says how good it is, and so do its files."""

    def __init__(self, dial):
        self.dial, self.num_timesteps, self.env = dial, 0, None
        self.observation_space = self.action_space = None
        self._vec_normalize_env = None
        self._logger = configure(None, [])

    def _setup_model(self): ...

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        return observation["return_to_go"] * self.dial[self.num_timesteps - 1], None

    def save(self, path):
        path.write_text(str(self.num_timesteps))

    def learn(self, steps, callback):
        callback.init_callback(self)
        callback.on_training_start({}, {})
        for self.num_timesteps in range(1, steps + 1):
            callback.on_step()


def test_the_best_is_kept_by_the_first_target(tmp_path):
    best = tmp_path / "best.zip"
    callback = EvaluationCallback(
        vec(Purse()), 1, every_steps=1, target_returns=[0.2, 0.1], n_envs=1, best_path=best
    )
    Learner([0.2, 0.9, 0.5, 0.9, 0.1]).learn(5, callback)
    assert callback.best_step == max(callback.reports, key=lambda step: callback.reports[step].mean) == 2
    assert best.read_text() == "2"


def test_what_belongs_to_the_best_is_kept_with_it():
    noted = []
    callback = EvaluationCallback(
        vec(Purse()), 1, 1, target_returns=[0.2], on_new_best=lambda: noted.append(callback.best)
    )
    Learner([0.2, 0.9, 0.5, 0.95]).learn(4, callback)
    assert noted == sorted(noted)
    assert len(noted) == 3
    assert callback.best == noted[-1] == callback.last.first.mean


class Noisy(Countdown):
    """Draws from every global generator, as some environments do."""

    def step(self, action):
        random.random(), np.random.random(), torch.rand(())  # noqa: NPY002
        return super().step(action)


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_evaluation_changes_no_bit_of_a_training(deterministic):
    """Also if the environment and the policy draw from the generators that the training draws from."""
    trained = []
    for callbacks in ([], [EvaluationCallback(Noisy(4), 2, every_steps=5, deterministic=deterministic)]):
        agent = learner(vec(Countdown(3)))
        agent.learn(32, callbacks)
        trained.append((agent.policy.state_dict(), random.getstate(), np.random.random()))  # noqa: NPY002
        random.seed(0)
    (alone, *generators), (watched, *others) = trained
    assert all(torch.equal(alone[name], watched[name]) for name in alone)
    assert generators == others


def test_without_a_path_nothing_is_kept():
    callback = EvaluationCallback(vec(Purse()), 1, every_steps=2, target_returns=[0.2])
    Learner([0.2, 0.9]).learn(2, callback)
    assert callback.best_step == 2


def test_the_best_is_judged_by_other_episodes():
    """By default those that chose it are not those that `evaluate` plays."""
    chosen = inspect.signature(EvaluationCallback).parameters["seed"].default
    judged = inspect.signature(evaluate).parameters["seed"].default
    assert abs(chosen - judged) > 10_000


@pytest.mark.parametrize("given", [{"episodes": 0}, {"every_steps": -1}])
def test_less_than_one_is_refused_before_training(given):
    name, value = next(iter(given.items()))
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        EvaluationCallback(Countdown(), **given)
