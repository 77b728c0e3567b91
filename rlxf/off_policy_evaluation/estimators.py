"""Estimators of the value of a policy from logged episodes: direct, doubly robust, weighted doubly robust.

All functions run over flat arrays of N steps, without a loop over time.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlxf.data import Trajectories
from rlxf.off_policy_evaluation.fitted_q import StepValues

Floats = NDArray[np.float64]
LARGEST_LOG_RATIO = 700.0
"""Largest logarithm of a ratio that `doubly_robust_scores` uses; larger ratios exceed float64."""


@dataclass(frozen=True, eq=False)
class LoggedEpisodes:
    """Episodes as the estimators use them.

    Args:
        rewards: float64 (N,).
        offsets: int64 (E + 1,), first step of each episode and N.
        terminated: bool (E,).
        usable: bool (N,), steps with a known next observation or a terminal next state.
        discount: gamma.
        step_ratios: importance ratios ``pi(a_t | h_t) / mu(a_t | s_t)`` of the steps, float64 (N,).
    """

    rewards: Floats
    offsets: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    usable: NDArray[np.bool_]
    discount: float
    step_ratios: Floats

    @classmethod
    def of(cls, data: Trajectories, discount: float, step_ratios: Floats | None = None) -> "LoggedEpisodes":
        """Return the episodes of a dataset; ratios are 1 if they are not given."""
        ratios = np.ones(data.steps) if step_ratios is None else step_ratios
        rewards = data.rewards.astype(np.float64)
        offsets = np.asarray(data.offsets)
        return cls(rewards, offsets, np.asarray(data.terminated), data.complete_transitions, discount, ratios)

    @property
    def episodes(self) -> int:
        """Number of episodes E."""
        return len(self.offsets) - 1

    @cached_property
    def episode(self) -> NDArray[np.int64]:
        """Episode of each step, (N,)."""
        return np.repeat(np.arange(self.episodes), np.diff(self.offsets))

    @cached_property
    def time(self) -> NDArray[np.int64]:
        """Time step of each step in its episode, (N,)."""
        return np.arange(len(self.rewards)) - self.offsets[self.episode]

    @cached_property
    def log_ratios(self) -> Floats:
        """Logarithms of ``rho_(0:t) = prod_(k <= t) pi(a_k | h_k) / mu(a_k | s_k)``, (N,); -inf for 0.

        Ratios of long episodes exceed the range of float64, and their logarithms do not.
        """
        zero = self.step_ratios <= 0
        sums = self._within_episode(np.log(np.where(zero, 1.0, self.step_ratios)))
        return np.where(self._within_episode(zero.astype(np.int64)) > 0, -np.inf, sums)

    @property
    def corrected_log_ratios(self) -> Floats:
        """Logarithm of the ratio at the last usable step of each episode that has one, (E,) at most."""
        last = self.offsets[1:] - 1 - ~self.terminated
        return self.log_ratios[last[last >= self.offsets[:-1]]]

    def _within_episode(self, values: NDArray) -> NDArray:
        """Return the cumulative sums of values (N,) from the start of each episode."""
        sums = np.cumsum(values)
        first = self.offsets[:-1]
        return sums - (sums[first] - values[first])[self.episode]

    def errors(self, q: Floats, v: Floats) -> Floats:
        """Compute ``gamma^t (r_t + gamma V(s_(t+1)) - Q(s_t, a_t))``, (N,); 0 for steps that are not usable.

        V is 0 after the last step of a terminated episode.
        """
        following = np.append(v[1:], 0.0)
        following[self.offsets[1:] - 1] = 0.0
        errors = self.rewards + self.discount * following - q
        return np.where(self.usable, self.discount**self.time * errors, 0.0)


def direct_scores(log: LoggedEpisodes, q: Floats, v: Floats) -> Floats:
    """Return ``V(s_0)`` of each episode, (E,): the scores of the direct method."""
    return v[log.offsets[:-1]]


def doubly_robust_scores(log: LoggedEpisodes, q: Floats, v: Floats) -> Floats:
    r"""Return the doubly robust estimate of each episode, (E,).

    ``V(s_0) + sum_t gamma^t rho_(0:t) (r_t + gamma V(s_(t+1)) - Q(s_t, a_t))``

    This is the recursion of the paper, unrolled. Its mean over episodes is unbiased if Q and V do not depend
    on these episodes, and the probabilities of the behavior policy or Q and V are exact. The unknown rest of
    a truncated episode counts as V of its last observation.

    Source: Jiang and Li 2016, arXiv:1511.03722, equation 10.
    """
    ratios = np.exp(np.minimum(log.log_ratios, LARGEST_LOG_RATIO))
    return v[log.offsets[:-1]] + np.add.reduceat(ratios * log.errors(q, v), log.offsets[:-1])


def weighted_doubly_robust(log: LoggedEpisodes, q: Floats, v: Floats, counts: Floats) -> float:
    r"""Return the weighted doubly robust estimate, in which ratios are normalized at each time step.

    ``sum_i n_i V(s_0^i) / n + sum_i sum_t gamma^t w_t^i (r_t^i + gamma V(s_(t+1)^i) - Q(s_t^i, a_t^i))``,
    ``w_t^i = n_i rho_(0:t)^i / sum_j n_j rho_(0:t)^j``

    Terminated episodes stay in the normalization with their last ratio, as in an absorbing state. Truncated
    episodes leave it after their last usable step. It is biased, but its variance is much lower than that of
    `doubly_robust_scores` if ratios vary.

    Source: Thomas and Brunskill 2016, arXiv:1604.00923, section 5.

    Args:
        log: the episodes.
        q: Q(s_t, a_t), (N,).
        v: V(s_t), (N,).
        counts: n_i, how often each episode counts, (E,); ones, or the counts of a resample.
    """
    with np.errstate(divide="ignore"):  # log 0 = -inf for episodes that are not in the resample
        logs = log.log_ratios + np.log(counts)[log.episode]
    counted = log.usable & (logs > -np.inf)
    weights = np.exp(logs[counted] - _log_totals(log, logs)[log.time[counted]])
    start = np.average(direct_scores(log, q, v), weights=counts)
    return float(start + weights @ log.errors(q, v)[counted])


def _log_totals(log: LoggedEpisodes, logs: Floats) -> Floats:
    """Return the logarithm of the sum of ``exp(logs)``, (N,), at each time step, (T,).

    Terminated episodes stay in the sum with their last value, and truncated ones leave it.
    """
    lengths = np.diff(log.offsets)
    horizon = lengths.max()
    running = _log_sums(logs[log.usable], log.time[log.usable], horizon)
    final = logs[log.offsets[1:] - 1]
    ended = _log_sums(final[log.terminated], lengths[log.terminated], horizon + 1)[:horizon]
    return np.logaddexp(running, np.logaddexp.accumulate(ended))


def _log_sums(logs: Floats, groups: NDArray[np.int64], number: int) -> Floats:
    """Return the logarithm of the sum of ``exp(logs)`` of each group, (number,); -inf for a sum of 0."""
    largest = np.full(number, -np.inf)
    np.maximum.at(largest, groups, logs)
    shift = np.where(largest > -np.inf, largest, 0.0)
    with np.errstate(divide="ignore"):
        return shift + np.log(np.bincount(groups, np.exp(logs - shift[groups]), number))


def effective_sample_size(log_ratios: Floats) -> float:
    """Compute ``(sum_i rho_i)^2 / sum_i rho_i^2`` of the ratios of E episodes: from 0 or 1 to E.

    It is the number of episodes that a sample from the policy itself would need for the same variance (Kong
    1992), and 0 if all ratios are 0.

    Args:
        log_ratios: logarithms of rho_i, (E,); -inf for ratios of 0.
    """
    largest = log_ratios.max(initial=-np.inf)
    if largest == -np.inf:
        return 0.0
    scaled = np.exp(log_ratios - largest)
    return float(scaled.sum() ** 2 / np.square(scaled).sum())


def resampled_values(
    log: LoggedEpisodes, values: StepValues, method: str, counts: NDArray[np.int64]
) -> tuple[float, Floats]:
    """Return the estimate, and the estimates of R resamples for each member, (M, R).

    The estimate uses the mean of the members' values and all episodes.

    Args:
        log: the episodes.
        values: values of the M members.
        method: a key of `SCORES`, or "wdr".
        counts: how often each episode occurs in each resample, (R, E).
    """
    members = [*zip(values.q, values.v, strict=True)]
    mean_q = values.q.mean(axis=0)
    mean_v = values.v.mean(axis=0)
    if method in SCORES:
        score = SCORES[method]
        each = np.stack([counts @ score(log, *member) / log.episodes for member in members])
        return float(score(log, mean_q, mean_v).mean()), each
    weights = counts.astype(np.float64)
    each = np.array([[weighted_doubly_robust(log, *member, row) for row in weights] for member in members])
    return weighted_doubly_robust(log, mean_q, mean_v, np.ones(log.episodes)), each


SCORES = {"fqe": direct_scores, "dr": doubly_robust_scores}
"""Method -> scores of the episodes, whose mean is the estimate."""
