"""Diagnostics of training: warnings about failing runs."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor

from rlxf.agents.common.actions import BoxActions, action_encoder
from rlxf.agents.gtrxl.value_head import PopArtHead
from rlxf.utils.warnings import warn_user

COLLAPSED = 0.01
"""Collapse threshold: fraction of the maximal entropy; for Box actions, deviation per half range."""
EXPLOSION_RATIO = 100.0
"""Explosion threshold: value loss in multiples of that of a constant prediction, and of its own median."""
MIN_SAMPLES = 10
"""Minimum number of updates for a median of the value loss, and of episodes for a mean return."""
SMALL_RETURNS, SMALL_REWARDS = 30.0, 5e4
"""Multiples of all recent returns, and of the mean reward, above which the largest return hides them."""
LARGE_SCALE = 5.0
"""Multiple of all recent returns above which the scale of values is that of earlier ones."""
RECENT_UPDATES = 20
"""Number of updates whose returns are recent."""


class TrainingDiagnostics:
    """Check each update of a training run for signs of divergence.

    Args:
        action_space: action space of the agent.
    """

    def __init__(self, action_space: spaces.Space[Any]):
        self.entropy = EntropyCollapseCheck(action_space)
        self.value = ValueLossCheck()
        self.scale = ReturnScaleCheck()

    def check(
        self,
        metrics: Mapping[str, float],
        returns: Tensor,
        rewards: Tensor,
        scale: PopArtHead,
        episode_returns: Sequence[float],
    ) -> None:
        """Check the metrics of an update; entropy is only checked if the training algorithm has one.

        Args:
            metrics: metrics of the update by name.
            returns: (N,), returns of the steps that were trained on.
            rewards: (M,), rewards of those that did not end an episode, which contain no value.
            scale: value head with the scale of recent returns.
            episode_returns: returns of the recent episodes.
        """
        if not returns.numel():  # of several processes, this one lost all its steps
            return
        spread = (returns - float(scale.mean)).square().mean().item()
        self.value.check(metrics["value_loss"], max(spread, float(scale.deviation) ** 2))
        newest, reward = returns.abs().max().item(), rewards.abs().mean().item()
        self.scale.check(newest, reward, float(scale.largest), float(scale.deviation))
        if "entropy_loss" in metrics and len(episode_returns) >= MIN_SAMPLES:
            self.entropy.check(-metrics["entropy_loss"], float(np.mean(episode_returns)))


class EntropyCollapseCheck:
    """Warn once when the entropy of the policy collapses without an improvement of the returns.

    A solved task also ends with little entropy, because of `GTrXLPPO`'s schedule. Its returns are better than
    those of the first episodes, so there is no warning. Without SB3's ``Monitor`` there are no returns to
    compare, and no warning.

    Args:
        action_space: determines the threshold (`collapse_threshold`).
    """

    def __init__(self, action_space: spaces.Space[Any]):
        self._action_space = action_space
        self.first_return: float | None = None
        self._warned = False

    def check(self, entropy: float, mean_return: float) -> None:
        """Check one update.

        Args:
            entropy: mean entropy over the steps of the update, in nats.
            mean_return: mean return of the recent episodes.
        """
        if self.first_return is None:
            self.first_return = mean_return
            return
        collapsed = entropy < collapse_threshold(self._action_space) and mean_return <= self.first_return
        if collapsed and not self._warned:
            self._warned = True
            warn_user(
                f"the policy has stopped exploring: its entropy is {entropy:.3g} nats, and the mean return "
                f"{mean_return:.3g} is no better than the initial {self.first_return:.3g}; raise ent_coef, "
                f"or lower the learning rate"
            )


class ValueLossCheck:
    """Warn once when the value loss explodes.

    The loss explodes if it exceeds two bounds: 100 times the variance of the returns, which is the loss of a
    constant prediction, and 100 times the median of this ratio over the last 100 updates. The check requires
    ten updates. The first nonzero reward of a task with sparse rewards raises the loss and the variance
    alike, so it does not trigger a warning.
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=100)
        self._warned = False

    def check(self, value_loss: float, spread: float) -> None:
        """Check one update.

        Args:
            value_loss: mean squared error of the values.
            spread: loss of a constant prediction, more than 0.
        """
        ratio = value_loss / spread
        usual = median(self._ratios) if len(self._ratios) >= MIN_SAMPLES else math.inf
        self._ratios.append(ratio)
        if ratio > EXPLOSION_RATIO * max(1.0, usual) and not self._warned:
            self._warned = True
            warn_user(
                f"the value loss explodes: {value_loss:.3g} is {ratio:.3g} times that of a constant "
                f"prediction, and the median of this ratio so far is {usual:.3g}; lower the learning rate or "
                f"max_grad_norm"
            )


class ReturnScaleCheck:
    """Warn once when recent rewards and returns are tiny in comparison with the largest return so far.

    After the first 20 rollouts, the scale of values and advantages decreases by at most 3% per rollout
    (`PopArtHead`). So returns of a million, e.g. of an earlier task with much larger rewards, hide later
    rewards of one. Recent returns may contain errors of values on that scale, so they alone do not show that
    rewards are tiny. Steps without rewards cause no warning: a sparse reward is expected to be large in
    comparison.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_UPDATES)
        self._warned = False

    def check(self, newest: float, reward: float, largest: float, deviation: float) -> None:
        """Check one update.

        Args:
            newest: largest absolute return of the update.
            reward: mean absolute reward of the update; NaN if there is none.
            largest: largest absolute return so far.
            deviation: standard deviation of the returns, the scale of values.
        """
        self._recent.append(newest)
        recent = max(self._recent)
        is_old = largest > SMALL_RETURNS * recent and deviation > LARGE_SCALE * recent
        is_hidden = is_old and 0 < SMALL_REWARDS * reward < largest
        if is_hidden and len(self._recent) == RECENT_UPDATES and not self._warned:
            self._warned = True
            warn_user(
                f"rewards are tiny in comparison with an earlier return of {largest:.3g}: their mean size is "
                f"{reward:.3g}. Such returns set the scale of values and advantages for hundreds of updates, "
                f"in which the agent hardly learns. If they were outliers, clip the rewards in the "
                f"environment and start a new run. For a task with smaller rewards, build a new agent and "
                f"call its load_pretrained with this one"
            )


def collapse_threshold(action_space: spaces.Space[Any]) -> float:
    """Return the entropy, in nats, below which a policy counts as collapsed.

    It is 1% of the entropy of a uniform policy. For Box actions it is the entropy of a Gaussian whose
    standard deviation is 1% of half the range; components without bounds count as [-1, 1].
    """
    encoder = action_encoder(action_space)
    if isinstance(encoder, BoxActions):
        each = 0.5 * math.log(2 * math.pi * math.e) + (COLLAPSED * encoder.radius).log()
        return float(each.sum())
    return COLLAPSED * sum(map(math.log, encoder.sizes))
