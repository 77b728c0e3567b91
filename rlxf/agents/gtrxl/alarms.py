"""Signs that a training goes wrong while all of its numbers are still finite: each is warned of once."""

import math
import warnings
from collections import deque
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from rlxf.agents.actions import BoxActions, action_form

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.ppo import GTrXLPPO

COLLAPSED = 0.01
"""Share of the entropy of even choices; of Box actions, deviation in shares of half the range."""
EXPLODED = 100.0
"""Value loss, in multiples of what a constant would have, and of its own median."""
USUAL = 10
"""Updates before the median of the value loss says something, and episodes before a mean return does."""


class Alarms:
    """Looks at each update of a training.

    Args:
        action_space: of the agent.
    """

    def __init__(self, action_space: spaces.Space[Any]):
        self.entropy, self.value = EntropyAlarm(action_space), ValueAlarm()

    def look(self, agent: "GTrXLPPO", noted: dict[str, float]) -> None:
        """Look at what an update of the agent noted; a lesson without an entropy has none to collapse."""
        buffer, scale = agent.rollout_buffer, agent.policy.value_net
        apart = (buffer.returns[buffer.weight == 1] - float(scale.mean)).square().mean().item()
        self.value.look(noted["value_loss"], max(apart, float(scale.deviation) ** 2))
        played = agent.ep_info_buffer or ()
        if "entropy_loss" in noted and len(played) >= USUAL:
            self.entropy.look(-noted["entropy_loss"], float(np.mean([info["r"] for info in played])))


class EntropyAlarm:
    """Warns once when a policy hardly explores any more and its returns are no better than at first.

    A task that is solved ends with little entropy, too, as `GTrXLPPO`'s schedule wants: its returns are
    better than those of the first episodes, and nothing is said. Without SB3's ``Monitor`` there are no
    returns to compare.

    Args:
        action_space: tells how little entropy is too little (`least_entropy`).
    """

    def __init__(self, action_space: spaces.Space[Any]):
        self._action_space = action_space
        self.first_return: float | None = None
        self._told = False

    @cached_property
    def least(self) -> float:
        """`least_entropy`."""
        return least_entropy(self._action_space)

    def look(self, entropy: float, mean_return: float) -> None:
        """Look at one update.

        Args:
            entropy: mean over its steps, in nats.
            mean_return: of the last episodes.
        """
        if self.first_return is None:
            self.first_return = mean_return
        elif entropy < self.least and mean_return <= self.first_return and not self._told:
            self._told = True
            warnings.warn(
                f"the policy hardly explores any more: its entropy is {entropy:.3g} nats, and the mean "
                f"return {mean_return:.3g} is no better than {self.first_return:.3g} at first; raise "
                f"ent_coef, or lower the learning rate",
                stacklevel=2,
            )


class ValueAlarm:
    """Warns once when the value loss explodes.

    That is when it exceeds both 100 times the mean square of the returns around their mean, which is what a
    constant would have, and 100 times its own median over the last 100 updates, once there are ten. The first
    reward of a task where rewards are rare raises both alike, so nothing is said.
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=100)
        self._told = False

    def look(self, value_loss: float, spread: float) -> None:
        """Look at one update.

        Args:
            value_loss: mean squared error of the values.
            spread: what it is measured by, more than 0.
        """
        ratio = value_loss / spread
        usual = median(self._ratios) if len(self._ratios) >= USUAL else math.inf
        self._ratios.append(ratio)
        if ratio > EXPLODED * max(1.0, usual) and not self._told:
            self._told = True
            warnings.warn(
                f"the value loss explodes: {value_loss:.3g}, {ratio:.3g} times what a constant would have, "
                f"and {usual:.3g} times is usual in this training; lower the learning rate or "
                f"max_grad_norm, or make rewards smaller",
                stacklevel=2,
            )


def least_entropy(action_space: spaces.Space[Any]) -> float:
    """In nats: 1% of that of even choices; for Box, that of a Gaussian of deviation 1% of half the range.

    Numbers without bounds count as if they went from -1 to 1.
    """
    form = action_form(action_space)
    if isinstance(form, BoxActions):
        each = 0.5 * math.log(2 * math.pi * math.e) + (COLLAPSED * form.radius).log()
        return float(each.sum())
    return COLLAPSED * sum(map(math.log, form.sizes))
