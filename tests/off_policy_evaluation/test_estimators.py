"""Tests of the doubly robust estimators: unbiasedness, the formulas as slow loops, ends of episodes."""

import numpy as np
import pytest

from rlxf.off_policy_evaluation.estimators import (
    LoggedEpisodes,
    direct_scores,
    doubly_robust_scores,
    effective_sample_size,
    weighted_doubly_robust,
)
from tests.off_policy_evaluation.worlds import TabularMDP, episodes_of, states_of

MDP = TabularMDP(survival=0.5)
BEHAVIOR = np.array([[0.3, 0.7], [0.6, 0.4], [0.5, 0.5], [0.8, 0.2]])
POLICY = np.array([[0.8, 0.2], [0.5, 0.5], [0.1, 0.9], [0.6, 0.4]])
DISCOUNT = 0.9


def logged(data, policy=POLICY, behavior=BEHAVIOR):
    states = states_of(data)
    ratios = policy[states, data.actions] / behavior[states, data.actions]
    return LoggedEpisodes.of(data, DISCOUNT, ratios)


def values(data, q):
    states = states_of(data)
    return q[states, data.actions], (POLICY * q).sum(axis=1)[states]


def exact_start():
    """Value of the policy in a uniform first state."""
    return (POLICY * MDP.q(POLICY, DISCOUNT)).sum(axis=1).mean()


@pytest.mark.parametrize("case", ["wrong Q", "wrong behavior policy"])
def test_doubly_robust_is_unbiased_if_ratios_or_values_are_right(case):
    """The mean over many small datasets is within three standard errors of the exact value."""
    q, behavior = MDP.q(POLICY, DISCOUNT), BEHAVIOR
    if case == "wrong Q":
        q = q + np.random.default_rng(0).normal(size=q.shape)
    else:
        behavior = np.full_like(BEHAVIOR, 0.5)
    estimates = []
    for seed in range(300):
        data = MDP.record(BEHAVIOR, 10, seed, limit=1000)
        estimates.append(doubly_robust_scores(logged(data, behavior=behavior), *values(data, q)).mean())
    assert abs(np.mean(estimates) - exact_start()) < 3 * np.std(estimates) / len(estimates) ** 0.5


def test_the_direct_method_is_biased_with_the_same_wrong_values():
    """Otherwise the test above would prove nothing."""
    q = MDP.q(POLICY, DISCOUNT) + np.random.default_rng(0).normal(size=(4, 2))
    data = MDP.record(BEHAVIOR, 500, 0)
    assert abs(direct_scores(logged(data), *values(data, q)).mean() - exact_start()) > 0.1


def test_doubly_robust_equals_the_recursion_of_the_paper():
    """``V_DR = V + rho (r + gamma V_DR' - Q)``; after a truncated episode, V_DR is V of its last state."""
    data = MDP.record(BEHAVIOR, 30, 0, limit=3)
    assert data.truncated.any()
    log = logged(data)
    q, v = values(data, np.random.default_rng(2).normal(size=(4, 2)))
    for episode, score in enumerate(doubly_robust_scores(log, q, v)):
        start, end = data.offsets[episode : episode + 2]
        known = end if data.terminated[episode] else end - 1
        expected = 0.0 if data.terminated[episode] else v[end - 1]
        for t in range(known - 1, start - 1, -1):
            expected = v[t] + log.step_ratios[t] * (data.rewards[t] + DISCOUNT * expected - q[t])
        assert score == pytest.approx(expected, rel=1e-6)


def test_weighted_doubly_robust_equals_the_sum_of_the_paper():
    """Thomas and Brunskill 2016, equation 10, with absorbing states after the end of an episode."""
    data = MDP.record(BEHAVIOR, 20, 0, limit=1000)
    assert data.terminated.all()
    log = logged(data)
    q, v = values(data, np.random.default_rng(2).normal(size=(4, 2)))
    horizon, n = int(data.lengths.max()), data.episodes
    ratios, rewards, qs, vs = (np.zeros((n, horizon)) for _ in range(4))
    for i in range(n):
        steps = slice(data.offsets[i], data.offsets[i + 1])
        length = data.lengths[i]
        ratios[i] = np.exp(np.pad(log.log_ratios[steps], (0, horizon - length), "edge"))
        rewards[i, :length], qs[i, :length], vs[i, :length] = data.rewards[steps], q[steps], v[steps]
    weights = ratios / ratios.sum(axis=0)
    before = np.concatenate([np.full((n, 1), 1 / n), weights[:, :-1]], axis=1)
    powers = DISCOUNT ** np.arange(horizon)
    expected = (powers * (weights * rewards - (weights * qs - before * vs))).sum()
    assert weighted_doubly_robust(log, q, v, np.ones(n)) == pytest.approx(expected, rel=1e-6)


def test_only_terminated_episodes_keep_their_weight_after_their_last_known_step():
    data = MDP.record(BEHAVIOR, 20, 0, limit=3)
    assert 0 < data.terminated.sum() < data.episodes
    log = logged(data)
    q, v = values(data, np.random.default_rng(2).normal(size=(4, 2)))
    errors, known = log.errors(q, v), data.lengths - ~data.terminated
    expected = v[data.offsets[:-1]].mean()
    for t in range(3):
        running = data.offsets[:-1][known > t] + t
        ended = data.offsets[1:][data.terminated & (data.lengths <= t)] - 1
        ratios = np.exp(log.log_ratios)
        expected += ratios[running] @ errors[running] / (ratios[running].sum() + ratios[ended].sum())
    assert weighted_doubly_robust(log, q, v, np.ones(data.episodes)) == pytest.approx(expected, rel=1e-6)


def test_a_repeated_episode_counts_twice():
    data = MDP.record(BEHAVIOR, 3, 0)
    steps = np.r_[0 : data.steps, data.offsets[1] : data.offsets[2]]
    twice = LoggedEpisodes(
        data.rewards[steps].astype(np.float64),
        np.append(data.offsets, data.steps + data.lengths[1]),
        data.terminated[[0, 1, 2, 1]],
        logged(data).usable[steps],
        DISCOUNT,
        logged(data).step_ratios[steps],
    )
    q, v = values(data, MDP.rewards)
    counted = weighted_doubly_robust(logged(data), q, v, np.array([1.0, 2.0, 1.0]))
    assert counted == pytest.approx(weighted_doubly_robust(twice, q[steps], v[steps], np.ones(4)))


def test_ratios_of_zero_and_overflow():
    """After a step with the ratio 0, all ratios of the episode are 0."""
    data = MDP.record(BEHAVIOR, 5, 0)
    longest = int(np.argmax(data.lengths))
    assert data.lengths[longest] > 2
    zero = data.offsets[longest] + 1
    ratios = np.full(data.steps, 1e300)
    ratios[zero] = 0.0
    log = LoggedEpisodes.of(data, DISCOUNT, ratios)
    after = np.zeros(data.steps, bool)
    after[zero : data.offsets[longest + 1]] = True
    np.testing.assert_array_equal(log.log_ratios == -np.inf, after)
    assert (log.log_ratios[~after] > 0).all()
    assert np.isfinite(doubly_robust_scores(log, *values(data, MDP.rewards))).all()


@pytest.mark.parametrize("scale", [-3.0, 3.0])
def test_weighted_doubly_robust_and_sample_size_of_ratios_beyond_float64(scale):
    """Weights depend on the quotients of ratios only: a common factor exp(scale) per step changes nothing."""
    lengths, rng = [1000, 1000, 800, 1000], np.random.default_rng(0)
    rewards = rng.normal(size=sum(lengths))
    data = episodes_of(np.zeros((sum(lengths), 1)), np.zeros(sum(lengths)), rewards, lengths, [True] * 4)
    steps = np.exp(rng.normal(0, 0.02, len(rewards)))
    common = np.exp(scale) ** (np.arange(1, 1001) <= 800)  # only while all episodes run
    factors = np.concatenate([common[:length] for length in lengths])
    near, far = (LoggedEpisodes.of(data, 1.0, ratios) for ratios in (steps, steps * factors))
    q = v = np.zeros(len(rewards))
    counts = np.array([1.0, 0.0, 2.0, 1.0])
    expected = weighted_doubly_robust(near, q, v, counts)
    assert weighted_doubly_robust(far, q, v, counts) == pytest.approx(expected, rel=1e-9)
    sizes = [effective_sample_size(log.corrected_log_ratios) for log in (near, far)]
    assert 1 < sizes[0] < 4
    assert sizes[1] == pytest.approx(sizes[0])


def test_ratios_that_correct_an_episode_leave_out_a_last_step_without_next_observation():
    data = MDP.record(BEHAVIOR, 30, 0, limit=3)
    log = logged(data)
    ends = data.offsets[1:] - data.truncated
    used = [log.step_ratios[start:end] for start, end in zip(data.offsets[:-1], ends, strict=True)]
    expected = [np.prod(each) for each in used if len(each)]
    assert data.truncated.any()
    assert data.terminated.any()
    np.testing.assert_allclose(np.exp(log.corrected_log_ratios), expected)


def test_effective_sample_size():
    assert effective_sample_size(np.zeros(7)) == pytest.approx(7)
    assert effective_sample_size(np.array([-np.inf, 5.0, -2000.0])) == pytest.approx(1)
    assert effective_sample_size(np.array([-2000.0, -2000.0])) == pytest.approx(2)
    assert effective_sample_size(np.full(3, -np.inf)) == 0
