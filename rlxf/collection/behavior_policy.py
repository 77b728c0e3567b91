"""Behavior policies that collect data: agents, random actions, and mixtures of them."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.type_aliases import PolicyPredictor

from rlxf.evaluation.sweep import validate_targets


class RandomActions:
    """Policy that samples uniformly from the action space.

    Args:
        action_space: action space of one environment.
        seed: seed of the actions.
    """

    def __init__(self, action_space: spaces.Space[Any], seed: int):
        self._space = deepcopy(action_space)
        self._space.seed(seed)

    def sample(self, n_envs: int) -> NDArray[Any]:
        """Sample one action for each environment, (E, ...)."""
        return np.stack([self._space.sample() for _ in range(n_envs)])

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: NDArray[np.bool_] | None = None,
        deterministic: bool = False,
    ) -> tuple[NDArray[Any], None]:
        """Return random actions (E, ...), with the interface of SB3; E is the length of ``episode_start``."""
        assert episode_start is not None
        return self.sample(len(episode_start)), None


class WithRandomActions:
    """Agent whose actions are replaced by random ones with probability ``share``.

    The agent is not informed: its memory has the actions that it chose, not those that were taken.

    Args:
        agent: object with SB3's ``predict``.
        share: probability of a random action, from 0 to 1.
        action_space: action space of one environment.
        seed: seed of the random actions and of the choice of steps.
    """

    def __init__(self, agent: PolicyPredictor, share: float, action_space: spaces.Space[Any], seed: int):
        self.agent, self.share = agent, share
        self._random = RandomActions(action_space, seed)
        self._rng = np.random.default_rng(seed)

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: NDArray[np.bool_] | None = None,
        deterministic: bool = False,
    ) -> tuple[NDArray[Any], Any]:
        """Return the agent's actions and state, with some actions replaced by random ones."""
        actions, state = self.agent.predict(observation, state, episode_start, deterministic)
        replaced = self._rng.random(len(actions)) < self.share
        if replaced.any():
            actions = np.array(actions)
            actions[replaced] = self._random.sample(len(actions))[replaced]
        return actions, state


Agent = PolicyPredictor | None


@dataclass(frozen=True)
class BehaviorPolicy:
    """Behavior policy: an agent, a fraction of random actions, and a target return.

    Args:
        agent: object with SB3's ``predict``, or None for random actions.
        random_share: fraction of actions that are replaced by random ones, from 0 to 1.
        target_return: target return for `ReturnToGo`; None for an agent that is not conditioned on a return.

    Raises:
        TypeError: if the agent has no ``predict``.
        ValueError: if the fraction is out of range.
    """

    agent: Agent
    random_share: float = 0.0
    target_return: float | None = None

    def __post_init__(self) -> None:
        if self.agent is not None and not callable(getattr(self.agent, "predict", None)):
            needed = "an agent must have predict(obs, state, episode_start, deterministic)"
            raise TypeError(f"{needed}, got {self.agent!r}")
        if not 0 <= self.random_share <= 1:
            raise ValueError(f"mix must be fractions of random actions from 0 to 1, got {self.random_share}")

    def __str__(self) -> str:
        if self.agent is None or self.random_share == 1:
            return "random actions"
        target = "" if self.target_return is None else f" with target return {self.target_return:g}"
        mixed = "" if self.random_share == 0 else f" with {self.random_share:.3g} of random actions"
        return type(self.agent).__name__ + target + mixed

    def make_policy(self, action_space: spaces.Space[Any], seed: int) -> PolicyPredictor:
        """Return an object with SB3's ``predict`` that acts according to this policy, except the target."""
        if self.agent is None or self.random_share == 1:
            return RandomActions(action_space, seed)
        return WithRandomActions(self.agent, self.random_share, action_space, seed)


def plan_policies(
    agents: Sequence[Agent], mix: Sequence[float], target_returns: Sequence[float] | None, episodes: int
) -> list[BehaviorPolicy]:
    """Return the policies of all combinations of agents, fractions of random actions and targets.

    Raises:
        ValueError: if a fraction or a target is out of range, there are no policies, or there are fewer
            episodes than policies.
        TypeError: if an agent has no ``predict``.
    """
    targets = [None] if target_returns is None else validate_targets(target_returns, None)
    if not mix:
        raise ValueError("mix must have at least one fraction of random actions, from 0 to 1, got none")
    policies = [BehaviorPolicy(*combination) for combination in product(agents, mix, targets)]
    if not policies:
        raise ValueError(f"there is no agent to record: got agents {list(agents)} and mix {list(mix)}")
    if episodes < len(policies):
        raise ValueError(
            f"episodes must be at least {len(policies)}, one for each combination of agent, fraction of "
            f"random actions and target return, got {episodes}"
        )
    return policies
