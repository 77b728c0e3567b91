"""`estimate_return`: estimate the return of an agent from logged episodes, without its environment."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy
import torch
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray
from stable_baselines3.common.utils import get_device

from rlxf.agents.common.arguments import check_device
from rlxf.agents.common.checkpoint import MAX_NUMPY_SEED
from rlxf.data import Trajectories, as_trajectories
from rlxf.data.dataset_source import Dataset
from rlxf.data.findings import unused_rewards
from rlxf.evaluation.agents import is_return_conditioned_agent, return_range
from rlxf.evaluation.episodes import unconditioned_message, validate_targets
from rlxf.evaluation.intervals import CONFIDENCE
from rlxf.off_policy_evaluation.behavior import check_probabilities, estimate_behavior
from rlxf.off_policy_evaluation.estimators import (
    LoggedEpisodes,
    effective_sample_size,
    resampled_values,
)
from rlxf.off_policy_evaluation.fitted_q import (
    FittedQConfig,
    StepValues,
    check_data,
    discounted_returns_to_go,
    fit_q,
    folds_of_episodes,
    resample_counts,
)
from rlxf.off_policy_evaluation.policy_replay import Replay, check_replayable, replay
from rlxf.off_policy_evaluation.result import METHODS, Method, OffPolicyEstimate
from rlxf.utils.checks import check_int
from rlxf.utils.errors import NumericalError
from rlxf.utils.warnings import warn_user

RESAMPLES = 200
"""Number of resamples of the episodes for the interval, for each member of the ensemble."""
FEW_SAMPLES = 10
"""Effective sample size below which a doubly robust estimate is reported as unreliable."""
PROPAGATION = 3.0
"""Horizons ``1 / (1 - discount)`` over which values must propagate in the training, see `FittedQConfig`."""


UNKNOWN_BEHAVIOR = (
    "the behavior policy is unknown: its probabilities are estimated by behavior cloning of the data"
)
UNUSED_PROBABILITIES = (
    "behavior_probabilities has no effect on method='fqe'; use 'dr' or 'wdr', or leave it out"
)


def estimate_return(
    agent: Any,
    dataset: Dataset | Sequence[Dataset] | Trajectories,
    method: Method = "fqe",
    *,
    target_return: float | None = None,
    discount: float = FittedQConfig.discount,
    updates: int = FittedQConfig.updates,
    members: int = FittedQConfig.members,
    deterministic: bool = True,
    behavior_probabilities: ArrayLike | None = None,
    seed: int = 0,
    device: torch.device | str = "auto",
    progress_bar: bool = False,
) -> OffPolicyEstimate:
    r"""Estimate the return of an agent from logged episodes, without its environment.

    The estimate is the expected discounted return ``sum_t gamma^t r_t`` from the initial observations of the
    data, for episodes that end only in terminal states: time limits are not part of the values. Undiscounted
    returns, as `rlxf.evaluate` reports them, need data whose episodes all terminate (``discount=1``).

    - "fqe": fitted Q evaluation, ``mean of V(s_0)`` (`fit_q`). It works for all agents and actions. Its error
      is the extrapolation error of Q, where the agent acts unlike the data.
    - "dr": per-decision doubly robust (`doubly_robust_scores`). It corrects Q by importance ratios of
      discrete actions. It is unbiased if the behavior policy is known, because the Q function that is applied
      to an episode is trained on other episodes (cross-fitting). Its variance grows with the length of
      episodes.
    - "wdr": weighted doubly robust (`weighted_doubly_robust`), with less variance and some bias.

    The agent acts on the logged history, see `replay`, so its actions depend on logged instead of its own
    earlier actions. The 95% interval is ``value +- t s``. For "fqe", s^2 is the variance between the M
    members of the ensemble, each trained on a resample of the episodes, plus the variance over 200 resamples
    of the episodes for a given member; t is the quantile of Student's distribution with M - 1 degrees of
    freedom. For "dr" and "wdr", s^2 is the variance over 200 resamples of the E episodes, and t has E - 1
    degrees of freedom. The interval does not contain the bias of Q and, for "dr" and "wdr", the variance of
    Q and of estimated probabilities, which stay the same in all resamples.

    Source: Le et al. 2019, arXiv:1903.08738; Voloshin et al. 2019, arXiv:1911.06854 (comparison of methods).

    Args:
        agent: object with SB3's ``predict``. Agents of this package, and agents of SB3 without memory, also
            give probabilities of Discrete actions.
        dataset: Minari id, dataset, sequence of these, or `Trajectories`, with the spaces of the agent. It
            need not be the training data; from those, estimates are biased upward.
        method: "fqe", "dr" or "wdr". The last two need discrete actions with known probabilities, and at
            least two episodes; otherwise "fqe" is used, with a warning.
        target_return: target of a return-conditioned agent; None for the largest return in its data, or in
            ``dataset`` if unknown.
        discount: gamma, above 0 and at most 1.
        updates: gradient steps of fitted Q evaluation; at least ``150 / (1 - discount)`` are advisable.
        members: number of Q functions M, at least 2; with "dr" and "wdr" each is trained without a fold, 1/M
            of the episodes.
        deterministic: evaluate the most likely actions; False for the stochastic policy.
        behavior_probabilities: probability of each logged action under the policy that took it, (N,), for
            "dr" and "wdr". None to estimate it by behavior cloning of the episodes of the other folds.
        seed: seed of all random numbers, from 0 to 2^32 - 1.
        device: "auto", "cpu" or "cuda", for the Q functions.
        progress_bar: show progress bars.

    Raises:
        ValueError: before training, if an argument is out of range, a target is given for another agent,
            the rewards are all 0, or the discount is 1 and not all episodes are terminated.
        DatasetError: if the dataset is invalid or does not fit the agent.
        TypeError: if the agent has no ``predict``, or observations are large images.
        NumericalError: if the Q functions diverge, or importance ratios overflow.

    Warns:
        UserWarning: for each entry of ``warnings`` of the result, and if the target lies outside of the
            returns in the data. All but a small effective sample size are known before the training.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    check_int("seed", seed, least=0, most=MAX_NUMPY_SEED)
    config = FittedQConfig(discount=discount, updates=updates, members=members)
    check_device(device)
    data = as_trajectories(dataset)
    check_data(data, discount)
    check_replayable(agent, data)
    target = _target(agent, data, target_return)
    if behavior_probabilities is not None:
        behavior_probabilities = check_probabilities(behavior_probabilities, data)
    replayed = replay(agent, data, target, deterministic, seed, progress_bar)
    chosen, reason = _defined_method(method, replayed, data)
    limitations = [
        *_data_limitations(data, config),
        *_method_limitations(method, reason, behavior_probabilities is not None),
    ]
    for limitation in limitations:
        warn_user(limitation)
    evaluation = PolicyEvaluation(
        data, replayed, config, behavior_probabilities, seed, get_device(device), progress_bar
    )
    estimate = evaluation.estimate(chosen)
    return replace(estimate, target_return=target, warnings=(*limitations, *estimate.warnings))


@dataclass(frozen=True, eq=False)
class PolicyEvaluation:
    """Evaluation of an agent whose actions at the logged steps are known.

    Args:
        data: the logged episodes.
        replayed: actions of the agent.
        config: settings of fitted Q evaluation.
        behavior_probabilities: probability of each logged action, (N,); None to estimate it.
        seed: seed of all random numbers.
        device: device of the Q functions.
        progress_bar: show progress bars.
    """

    data: Trajectories
    replayed: Replay
    config: FittedQConfig
    behavior_probabilities: NDArray[np.float64] | None
    seed: int
    device: torch.device
    progress_bar: bool

    def estimate(self, method: Method) -> OffPolicyEstimate:
        """Return the estimate of a method, with a warning if the effective sample size is small."""
        fold_seed, interval_seed = np.random.SeedSequence(self.seed).spawn(2)
        by_ratios, discount = method != "fqe", self.config.discount
        folds = folds_of_episodes(self.data.episodes, self.config.members, fold_seed) if by_ratios else None
        values = self._fit_values(folds)
        log = LoggedEpisodes.of(self.data, discount, self._ratios(folds) if by_ratios else None)
        effective_size = effective_sample_size(log.corrected_log_ratios) if by_ratios else None
        limitations = _sample_limitations(effective_size, log.episodes)
        value, margin = _interval(log, values, method, interval_seed)
        return OffPolicyEstimate(
            value=value,
            ci_low=value - margin,
            ci_high=value + margin,
            method=method,
            discount=discount,
            logged_value=float(self._logged_returns().mean()),
            effective_sample_size=effective_size,
            warnings=tuple(limitations),
        )

    def _logged_returns(self) -> NDArray[np.float64]:
        """Return the discounted returns of the logged episodes, (E,)."""
        return discounted_returns_to_go(self.data, self.config.discount)[self.data.offsets[:-1]]

    def _fit_values(self, folds: NDArray[np.int64] | None) -> StepValues:
        """Fit the Q functions, and return their values at the logged steps.

        For cross-fitting, ``folds`` is the fold of each episode, (E,): each member is trained without one
        fold, and its values are those of the steps of this fold. Without folds all members are trained on all
        episodes.
        """
        held_out = None if folds is None else folds == np.arange(self.config.members)[:, None]
        replayed = self.replayed
        training = (self.config, replayed.return_to_go, self.seed, self.device, self.progress_bar)
        values = fit_q(self.data, replayed.actions, *training, held_out)
        return values if folds is None else values.of_members(np.repeat(folds, self.data.lengths))

    def _ratios(self, folds: NDArray[np.int64] | None) -> NDArray[np.float64]:
        """Return the importance ratios of the steps; probabilities of the data are estimated if unknown."""
        assert self.replayed.probability is not None
        behavior = self.behavior_probabilities
        if behavior is None:
            behavior = estimate_behavior(self.data, self.seed, self.device, folds=folds)
        return self.replayed.probability / behavior


def _target(agent: Any, data: Trajectories, target: float | None) -> float | None:
    """Return the target return, by default the largest in the agent's data; None for other agents."""
    if not is_return_conditioned_agent(agent):
        if target is not None:
            raise ValueError(unconditioned_message("target_return", agent))
        return None
    known = return_range(agent) or (float(data.returns.min()), float(data.returns.max()))
    return validate_targets([known[1] if target is None else target], known)[0]


def _data_limitations(data: Trajectories, config: FittedQConfig) -> list[str]:
    """Return limitations of the data and of the settings, as sentences."""
    unused = unused_rewards(data.rewards, data.complete_transitions)
    limitations = list(filter(None, [_unmarked_ends(data), unused]))
    if data.episodes == 1:
        limitations.append(
            "the data have a single episode: the interval contains no variation of episodes; use at least ten"
        )
    horizon = float(data.lengths.max()) if config.discount == 1 else 1 / (1 - config.discount)
    needed = math.ceil(round(PROPAGATION * horizon / config.target_rate, 3))
    if config.updates < needed:
        limitations.append(
            f"{config.updates} updates propagate values over about "
            f"{config.updates * config.target_rate:.0f} steps, so the estimate stays close to the return of "
            f"the data; use at least {needed}"
        )
    return limitations


def _unmarked_ends(data: Trajectories) -> str | None:
    """Return a sentence about episodes that end neither terminated nor truncated, if there are some."""
    neither = int(np.count_nonzero(~(data.terminated | data.truncated)))
    if not neither:
        return None
    return (
        f"{neither:,} of {data.episodes:,} episodes end neither terminated nor truncated, so they count as "
        f"truncated: rewards after their last recorded step are extrapolated; mark these ends as "
        f"terminations if the episodes ended there"
    )


def _defined_method(method: Method, replayed: Replay, data: Trajectories) -> tuple[Method, str | None]:
    """Return the method and None, or "fqe" and the reason if the method needs ratios that are not defined."""
    if method == "fqe" or (replayed.probability is not None and data.episodes > 1):
        return method, None
    reason = "the probabilities of the agent's actions are unknown"
    if data.episodes == 1:
        reason = "Q is fitted on other episodes than those it is applied to, and there is only one"
    elif isinstance(data.action_space, spaces.Box):
        reason = "importance ratios are computed for discrete actions only, and these actions are continuous"
    return "fqe", f"method={method!r} is replaced by 'fqe', the direct method: {reason}"


def _method_limitations(method: Method, reason: str | None, behavior_is_known: bool) -> list[str]:
    """Return limitations of a method, given the reason for which it is replaced, or None if it is not."""
    if method == "fqe":
        return [UNUSED_PROBABILITIES] if behavior_is_known else []
    if reason is not None:
        return [reason]
    return [] if behavior_is_known else [UNKNOWN_BEHAVIOR]


def _sample_limitations(effective_size: float | None, episodes: int) -> list[str]:
    """Return the limitation by a small effective sample size, after a warning; [] if there is none."""
    if effective_size is None or effective_size >= FEW_SAMPLES:
        return []
    limitation = _few_samples(effective_size, episodes)
    warn_user(limitation)
    return [limitation]


def _few_samples(effective_size: float, episodes: int) -> str:
    """Return a sentence about a small effective sample size, with its cause."""
    cause = (
        "the agent rarely takes the logged actions, so few episodes decide; prefer method='fqe', or "
        "deterministic=False"
    )
    if effective_size > episodes / 2:
        cause = "the data have few episodes; use more, or method='fqe'"
    return f"the effective sample size is {effective_size:.1f} of {episodes} episodes: {cause}"


def _interval(
    log: LoggedEpisodes, values: StepValues, method: Method, seed: np.random.SeedSequence
) -> tuple[float, float]:
    """Return the estimate and half the width of its 95% interval, see `estimate_return`."""
    generator = torch.Generator().manual_seed(int(seed.generate_state(1)[0]))
    counts = resample_counts(log.episodes, RESAMPLES, generator)
    value, resampled = resampled_values(log, values, method, counts)
    members = len(resampled)
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow raises the error below
        between = resampled.mean(axis=1).var(ddof=1) if members > 1 else 0.0
        variance = float(between + resampled.var(axis=1).mean())
    if not math.isfinite(variance):
        raise NumericalError(
            f"method={method!r} overflows: logarithms of importance ratios reach {log.log_ratios.max():.3g}. "
            f"The agent takes the logged actions with a much higher probability than the behavior policy; "
            f"use method='fqe'"
        )
    freedom = members - 1 if members > 1 else log.episodes - 1
    return value, float(scipy.stats.t.ppf(0.5 + CONFIDENCE / 2, freedom)) * math.sqrt(variance)
