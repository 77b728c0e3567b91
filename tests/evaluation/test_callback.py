"""Evaluation during a training of SB3's PPO, and its cost."""

import inspect
import json
import math
import random

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

from rlxf.evaluation import EvaluationCallback, evaluate, periodic
from rlxf.evaluation.environment import is_trained_in
from tests.evaluation.worlds import ActionRewardEnv, Countdown, learner, vec


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


def test_a_second_training_has_a_budget_and_reports_of_its_own():
    used, new = (EvaluationCallback(Countdown(4), episodes=2, every_steps=8, budget=0.5) for _ in range(2))
    learner(vec(Countdown(3))).learn(48, used)
    for callback in (used, new):
        learner(vec(Countdown(3))).learn(24, callback)
    assert new.reports
    assert (list(used.reports), used.played) == (list(new.reports), new.played)


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


def test_normalization_statistics_are_copied_between_other_wrappers():
    train_env, eval_env = VecNormalize(VecMonitor(vec(Countdown(9)))), VecNormalize(vec(Countdown(4)))
    learner(train_env).learn(32, EvaluationCallback(eval_env, episodes=1, every_steps=32))
    assert (eval_env.obs_rms.mean == train_env.obs_rms.mean).all()
    assert eval_env.ret_rms.var == train_env.ret_rms.var


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
    sweep = callback.last.reports
    assert callback.reports[5].mean == sweep[0.2].mean != sweep[0.1].mean


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


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"every_steps": 1.5}, ValueError, "every_steps must be a whole number, got 1.5"),
        ({"every_steps": math.nan}, ValueError, "every_steps must be a whole number, got nan"),
        ({"every_steps": "9"}, TypeError, "every_steps must be a whole number, got '9'"),
        ({"budget": -1}, ValueError, "budget must not be negative, got -1"),
        ({"budget": math.nan}, ValueError, "budget must be finite, got nan"),
        ({"env": "CartPoleX-v9"}, ValueError, "unknown environment id 'CartPoleX-v9'; similar ids: CartPole"),
        ({"env": None}, TypeError, "env must be a Gymnasium id, an Env, a VecEnv or a VectorEnv, got None"),
        ({"n_envs": 0}, ValueError, "n_envs must be at least 1, got 0"),
        ({"seed": "0"}, TypeError, "seed must be a whole number, got '0'"),
        ({"target_returns": [math.inf]}, ValueError, "target_returns must be one or more finite numbers"),
    ],
)
def test_bad_arguments_raise_before_training(given, error, message):
    with pytest.raises(error, match=message):
        EvaluationCallback(**{"env": Countdown(), **given})


def test_a_budget_can_be_infinite():
    assert EvaluationCallback(Countdown(), budget=math.inf).budget == math.inf


def test_targets_of_an_agent_without_return_conditioning_raise_before_training():
    agent = learner(vec(Countdown(3)))
    with pytest.raises(ValueError, match=r"target_returns needs an agent .* got PPO"):
        agent.learn(16, EvaluationCallback(Countdown(4), 2, 8, target_returns=[1.0]))
    assert agent.num_timesteps == 0


@pytest.mark.parametrize(
    "wrap", [lambda env: env, VecMonitor, lambda env: env.envs[1], lambda env: vec(*env.envs)]
)
def test_the_training_environment_is_refused(wrap):
    """Evaluations would end its episodes, and the observations of the training would be outdated."""
    agent = learner(vec(Countdown(3), Countdown(3)))
    with pytest.raises(ValueError, match=r"EvaluationCallback needs an environment of its own.*pass another"):
        agent.learn(32, EvaluationCallback(wrap(agent.get_env()), 2, 8))
    assert agent.num_timesteps == 0
    assert evaluate(agent, wrap(agent.get_env()), 2).episodes == 2, "allowed after the training"


def test_vector_environments_may_hold_other_objects():
    """``envs`` of a vector environment of the user's own may hold simulators."""
    env = vec(Countdown(3))
    agent = learner(env)
    env.envs = [object()]
    assert not is_trained_in(agent, vec(Countdown(3)))
    assert is_trained_in(agent, env)


def test_intervals_may_be_integral_floats():
    assert EvaluationCallback(Countdown(), every_steps=1e4).every_steps == 10_000


# End of the training


def test_the_training_ends_with_the_first_evaluation_that_reaches_the_return(tmp_path):
    callback = EvaluationCallback(
        Countdown(4), episodes=2, every_steps=8, stop_return=10.0, best_path=tmp_path / "best.zip"
    )
    agent = learn(64, callback)
    assert agent.num_timesteps == 16, "step 8 is before the first update"
    assert list(callback.reports) == [16]
    saved = PPO.load(tmp_path / "best.zip").policy.state_dict()
    assert all(torch.equal(saved[name], value) for name, value in agent.policy.state_dict().items())


def test_a_return_that_is_not_reached_does_not_end_the_training():
    callback = EvaluationCallback(Countdown(4), episodes=2, every_steps=8, stop_return=10.5)
    assert learn(32, callback).num_timesteps == 32


def test_a_training_continues_after_it_ended_early():
    """A training without a new evaluation is not ended by an earlier one."""
    callback = EvaluationCallback(Countdown(4), episodes=2, every_steps=16, stop_return=10.0)
    agent = learn(64, callback)
    assert agent.num_timesteps == 16
    agent.learn(8, callback, reset_num_timesteps=False)
    assert agent.num_timesteps == 24


def test_a_return_of_nan_is_refused():
    with pytest.raises(ValueError, match="stop_return must be a number or None, got nan"):
        EvaluationCallback(Countdown(), stop_return=float("nan"))


# Cost


def learn(steps, callback, length=3, n_envs=1):
    env = vec(*(Monitor(Countdown(length)) for _ in range(n_envs)))
    agent = PPO("MlpPolicy", env, n_steps=8 // n_envs, batch_size=8, n_epochs=1, device="cpu")
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


def test_no_evaluation_begins_while_the_first_episodes_may_exceed_the_budget():
    """After t steps without an end, 2 episodes have at least 2 t steps; the budget is t / 2."""
    limited = EvaluationCallback(Countdown(4), episodes=2, every_steps=8, budget=0.5)
    learn(40, limited, length=30)
    assert list(limited.reports) == [40]


def test_the_first_episodes_of_several_environments_are_shorter():
    """After 16 steps of 2 environments without an end, 2 episodes have at least 16 steps."""
    limited = EvaluationCallback(Countdown(4), episodes=2, every_steps=8, budget=1.0)
    learn(24, limited, length=30, n_envs=2)
    assert list(limited.reports) == [16, 24]


@pytest.mark.parametrize(
    "env",
    [Countdown(3), gymnasium.wrappers.TimeLimit(Monitor(Countdown(9)), 3)],
    ids=["no monitor", "inside"],
)
def test_evaluations_do_not_need_reports_of_training_episodes(env):
    limited = EvaluationCallback(Countdown(4), episodes=2, every_steps=8, budget=0.5)
    learner(vec(env)).learn(48, limited)
    assert list(limited.reports) == [16, 32, 48]


def test_the_agent_is_evaluated_at_the_end_although_the_budget_is_used_up():
    """The evaluations at steps 16 and 40 leave no budget for the last one."""
    limited = EvaluationCallback(Countdown(4), episodes=2, every_steps=8, budget=0.4)
    learn(48, limited)
    assert list(limited.reports) == [16, 40, 48]


def test_the_last_evaluation_is_not_repeated_until_the_end_of_the_rollout():
    """The last rollout of 8 steps ends after the total of 42 steps, at step 48."""
    limited = EvaluationCallback(Countdown(4), episodes=2, every_steps=8, budget=0.01)
    learn(42, limited)
    assert list(limited.reports) == [42]


def test_the_agent_is_evaluated_once_at_the_end_if_the_budget_is_too_small(tmp_path):
    limited = EvaluationCallback(
        Countdown(4), episodes=2, every_steps=8, budget=0.01, best_path=tmp_path / "best.zip"
    )
    learn(32, limited)
    assert list(limited.reports) == [32]
    assert (limited.best, limited.best_step) == (10.0, 32)
    assert (tmp_path / "best.zip").is_file()


def test_a_budget_leaves_out_evaluations_before_the_first_update():
    """PPO calls the callback at step 8 before the update, so the weights are still the initial ones."""
    limited = EvaluationCallback(Countdown(4), episodes=2, every_steps=8, budget=100.0)
    learn(16, limited)
    assert list(limited.reports) == [16]
    single = EvaluationCallback(Countdown(4), episodes=2, every_steps=8, budget=100.0)
    learn(8, single)
    assert not single.reports


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("played", value) for value in ("1", -1, 0.5, True, 2**63)),
        *(("has_ended", value) for value in ("yes", 1, None)),
        *(("best", value) for value in ("high", [1])),
        *(("best_step", value) for value in ("\x1b[31m", None, -1)),
        *(("episode_length", value) for value in ("long", None)),
    ],
)
def test_a_state_from_a_file_is_checked(name, value):
    state = {"played": 4, "has_ended": False, "best": 1.0, "best_step": 8, "episode_length": 2.0}
    callback = EvaluationCallback(Countdown(4), episodes=2, every_steps=8)
    callback.load_state(state)
    assert callback.state() == state
    with pytest.raises((TypeError, ValueError)):
        callback.load_state(state | {name: value})


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
    monkeypatch.setattr(periodic, "time", clock)
    every = steps // 10
    limited = EvaluationCallback(Timed(Countdown(4), clock, 0.5), 3, every, budget=0.2)
    PPO("MlpPolicy", vec(Timed(Countdown(3), clock, 1.0)), n_steps=8, batch_size=8, n_epochs=1).learn(
        steps, limited
    )
    assert limited.reports
    assert limited.seconds == limited.played * 0.5
    assert clock.now == steps + limited.seconds
    assert limited.seconds - 0.5 * 12 <= 0.1 * steps  # without the last one, of 3 episodes of 4 steps


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
