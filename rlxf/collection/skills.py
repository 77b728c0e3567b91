"""How well is played."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from gymnasium import spaces
from stable_baselines3.common.type_aliases import PolicyPredictor

from rlxf.collection.random_actions import RandomActions, WithRandomActions
from rlxf.evaluation.targets import checked_targets

Agent = PolicyPredictor | None


@dataclass(frozen=True)
class Skill:
    """One way to play.

    Args:
        agent: has SB3's ``predict``; None acts at random.
        random_share: how many of its actions are replaced by random ones, from 0 to 1.
        target_return: what it is asked for, by `ReturnToGo`; None for an agent that is not asked.

    Raises:
        TypeError: if the agent cannot predict.
        ValueError: if the share is out of range.
    """

    agent: Agent
    random_share: float = 0.0
    target_return: float | None = None

    def __post_init__(self) -> None:
        if self.agent is not None and not callable(getattr(self.agent, "predict", None)):
            wanted = "an agent must have predict(obs, state, episode_start, deterministic)"
            raise TypeError(f"{wanted}, got {self.agent!r}")
        if not 0 <= self.random_share <= 1:
            raise ValueError(f"mix must be shares of random actions from 0 to 1, got {self.random_share}")

    def __str__(self) -> str:
        if self.agent is None or self.random_share == 1:
            return "random actions"
        asked = "" if self.target_return is None else f" asked for {self.target_return:g}"
        mixed = "" if self.random_share == 0 else f" with {self.random_share:.3g} of random actions"
        return type(self.agent).__name__ + asked + mixed

    def player(self, action_space: spaces.Space[Any], seed: int) -> PolicyPredictor:
        """What plays so."""
        if self.agent is None or self.random_share == 1:
            return RandomActions(action_space, seed)
        return WithRandomActions(self.agent, self.random_share, action_space, seed)


def plan(
    agents: Sequence[Agent], mix: Sequence[float], target_returns: Sequence[float] | None, episodes: int
) -> list[Skill]:
    """Each agent with each share of random actions, asked for each target.

    Raises:
        ValueError: if a share or a target is out of range, or there is no skill or no episode for each.
        TypeError: if an agent cannot predict.
    """
    targets = [None] if target_returns is None else checked_targets(target_returns, None)
    if not mix:
        raise ValueError("mix must be one share of random actions or more, from 0 to 1, got none")
    skills = [Skill(*choice) for choice in product(agents, mix, targets)]
    if not skills:
        raise ValueError(f"there is nobody to record: got agents {list(agents)} and mix {list(mix)}")
    if episodes < len(skills):
        raise ValueError(f"episodes must be at least one for each of {len(skills)} skills, got {episodes}")
    return skills
