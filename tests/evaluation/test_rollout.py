"""Accumulation of episode returns."""

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit, TransformReward
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecMonitor

from rlxf import collect, evaluate
from rlxf.envs.infos import LOST
from rlxf.evaluation import rollout
from rlxf.evaluation.rollout import EpisodeCounter, accumulated_score, monitored_score, quotas
from rlxf.utils.errors import FaultyEnvironmentError
from tests.evaluation.worlds import Countdown, Idle, vec

counts = st.integers(1, 300)


@given(counts, st.integers(1, 64))
def test_quotas_are_even_and_add_up(episodes, n_envs):
    quota = quotas(episodes, n_envs)
    assert quota.sum() == episodes
    assert quota.max() - quota.min() <= 1


@given(st.data(), st.integers(1, 4), st.integers(1, 12))
def test_equals_a_loop_over_single_environments(data, n_envs, episodes):
    """Random rewards, ends and reset steps, compared with sums for one environment at a time."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    steps = []
    tally = EpisodeCounter(quotas(episodes, n_envs), accumulated_score)
    while tally.remaining.any():
        rewards, dones, filler = rng.normal(size=n_envs), rng.random(n_envs) < 0.4, rng.random(n_envs) < 0.2
        infos = [{"filler": True} if row else {} for row in filler]
        steps.append((rewards, dones, filler))
        tally.add(rewards, dones, infos)
    expected = [score for i in range(n_envs) for score in _single(steps, i, quotas(episodes, n_envs)[i])]
    report = tally.report()
    assert sorted(report.returns) == pytest.approx(sorted(total for total, _ in expected))
    assert sorted(report.lengths) == sorted(length for _, length in expected)


def _single(steps, i, quota):
    scores, total, length = [], 0.0, 0
    for rewards, dones, filler in steps:
        if filler[i]:
            continue
        total, length = total + rewards[i], length + 1
        if dones[i]:
            scores.append((total, length))
            total, length = 0.0, 0
    return scores[:quota]


class Small(Countdown):
    """Environment with rewards of 1, 2 and 3 times a small number, and thus a return of 6 times it."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def reward(self, action):
        return self.scale * self.time


class Constant(Countdown):
    """Environment with episodes of 3,000 steps and a reward of 0.1 in each."""

    def __init__(self):
        super().__init__(length=3_000)

    def reward(self, action):
        return 0.1


def test_returns_are_not_rounded_to_the_decimals_of_a_monitor():
    report = evaluate(Idle(), vec(Monitor(Small(1e-9))), episodes=2)
    np.testing.assert_allclose(report.returns, 6e-9, rtol=1e-6)


def test_returns_are_not_summed_in_the_precision_of_a_vec_monitor():
    report = evaluate(Idle(), VecMonitor(vec(Constant())), episodes=2)
    np.testing.assert_allclose(report.returns, 300.0, rtol=1e-7)


def test_small_returns_are_those_inside_wrappers_that_change_rewards():
    env = TransformReward(Monitor(Small(1e-3)), lambda reward: 1.5 * reward)
    assert evaluate(Idle(), vec(env), episodes=2).returns.tolist() == [0.006, 0.006]


class Chapters(Countdown):
    """Environment whose infos have an entry ``episode`` of another meaning."""

    def step(self, action):
        *results, info = super().step(action)
        return *results, info | {"episode": 3}


def test_an_entry_episode_of_another_meaning_is_no_score():
    """Also if a wrapper outside the monitor ends the episode, which leaves the entry of the environment."""
    envs = TimeLimit(Monitor(Chapters()), 2), Monitor(Chapters())
    assert evaluate(Idle(), vec(*envs), episodes=2).returns.tolist() == [3.0, 6.0]


@pytest.mark.parametrize("success", [1, np.float32(1), np.array([True]), np.array([[1.0]])])
def test_successes_may_be_arrays_of_one_element(success):
    envs = Countdown(last_info={"is_success": success}), Countdown()
    assert evaluate(Idle(), vec(*envs), episodes=4).successes.tolist() == [True, False, True, False]


def test_a_success_that_is_nan_does_not_count():
    envs = (Countdown(last_info={"is_success": success}) for success in (np.nan, 1.0))
    assert evaluate(Idle(), vec(*envs), episodes=2).successes.tolist() == [False, True]


def test_a_success_of_text_is_an_error():
    env = Countdown(last_info={"is_success": "no"})
    with pytest.raises(
        FaultyEnvironmentError, match=r"is_success.* must be True, False or a number, got 'no'"
    ):
        evaluate(Idle(), vec(env), episodes=1)


def test_lost_life_does_not_end_an_episode():
    tally = EpisodeCounter(np.array([1]), monitored_score)
    life_lost, episode_ended = {}, {"episode": {"r": 21.5, "l": 4}}
    tally.add(np.array([1.0]), np.array([True]), [life_lost])
    assert tally.remaining[0] == 1
    tally.add(np.array([1.0]), np.array([True]), [episode_ended])
    report = tally.report()
    assert report.returns.tolist() == [21.5]
    assert report.lengths.tolist() == [4]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_reward_raises_with_environment_and_step(value):
    tally = EpisodeCounter(np.array([1, 1]), accumulated_score)
    tally.add(np.zeros(2), np.zeros(2, dtype=bool), [{}, {}])
    with pytest.raises(ValueError, match=rf"got {value} from environment 1 at step 2"):
        tally.add(np.array([0.0, value]), np.zeros(2, dtype=bool), [{}, {}])


def test_non_finite_reward_of_a_filler_row_is_ignored():
    tally = EpisodeCounter(np.array([1]), accumulated_score)
    tally.add(np.array([np.nan]), np.array([False]), [{"filler": True}])
    tally.add(np.array([2.0]), np.array([True]), [{}])
    assert tally.report().returns.tolist() == [2.0]


def test_episode_lost_to_a_failure_is_not_counted():
    tally = EpisodeCounter(np.array([1]), accumulated_score)
    lost = {"filler": True, LOST: True}
    for reward, done, info in [(5.0, False, {}), (0.0, False, lost), (0.0, True, lost), (2.0, True, {})]:
        tally.add(np.array([reward]), np.array([done]), [info])
    report = tally.report()
    assert (report.returns.tolist(), report.lengths.tolist()) == ([2.0], [1])


class Steps:
    """Function that raises an error at the step after a number of steps."""

    def __init__(self, steps):
        self.left = steps

    def __call__(self):
        self.left -= 1
        if self.left < 0:
            raise InterruptedError


def steps_of(env, steps):
    """Evaluate ``env`` for a number of steps, and return the warnings about the ends of episodes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(InterruptedError):
            evaluate(Idle(), env, 2, on_step=Steps(steps))
    return [str(each.message) for each in caught if "has not ended" in str(each.message)]


@pytest.fixture
def short(monkeypatch):
    """Warn after 10 and 30 steps."""
    monkeypatch.setattr(rollout, "FIRST_END", 10)
    monkeypatch.setattr(rollout, "LATER_ENDS", 30)


@pytest.mark.usefixtures("short")
def test_episodes_that_do_not_end_warn_once():
    assert steps_of(vec(Countdown(1000), Countdown(1000)), 9) == []
    (message,) = steps_of(vec(Countdown(1000), Countdown(1000)), 100)
    assert "environment 0 has not ended in 10 steps" in message
    assert """--env-kwargs '{"max_episode_steps": N}'""" in message
    assert "TimeLimit" in message


@pytest.mark.usefixtures("short")
def test_one_environment_that_does_not_end_warns_later():
    env = vec(Countdown(5), Countdown(1000))
    assert steps_of(env, 29) == []
    (message,) = steps_of(env, 100)
    assert "environment 1 has not ended in 30 steps" in message


@pytest.mark.usefixtures("short")
def test_a_time_limit_that_is_longer_does_not_warn():
    limited = gymnasium.make("CartPole-v1", max_episode_steps=25).spec
    env = Countdown(1000)
    env.spec = limited
    assert steps_of(vec(env), 24) == []
    (message,) = steps_of(vec(env), 100)  # the environment lacks the wrapper
    assert "environment 0 has not ended in 30 steps" in message


@pytest.mark.usefixtures("short")
def test_episodes_that_end_at_a_long_time_limit_do_not_warn():
    """Ends are forgotten after 30 steps, so an episode of 40 steps may seem endless."""
    env = Countdown(40)
    env.spec = gymnasium.make("CartPole-v1", max_episode_steps=40).spec
    assert steps_of(vec(env), 75) == []


@pytest.mark.usefixtures("short")
def test_recording_warns_of_episodes_that_do_not_end(minari_root):
    env = vec(Countdown(40))
    with pytest.warns(UserWarning, match="environment 0 has not ended in 10 steps"):
        collect(None, env, "test/long-v0", 1)
