"""A training that several processes share: what an agent needs for that."""

from typing import Any, Protocol

import torch
from stable_baselines3.common.logger import Logger

from rlxf.attention import Routing, TransformerSpec
from rlxf.training.ranks import Ranks


class Shared(Protocol):
    """An agent that learns in several processes."""

    ranks: Ranks
    core: TransformerSpec
    order: torch.Generator
    policy: Any
    num_timesteps: int
    _n_updates: int

    def set_logger(self, logger: Logger) -> None:
        """As in Stable-Baselines3."""


def begin_together(agent: Shared, **numbers: int) -> None:
    """Let all processes of the agent's training begin alike; those that do not write log nowhere.

    Args:
        agent: before its first step.
        numbers: that must be the same in all of them, beside the steps and updates done.

    Raises:
        ValueError: if one is not, or the core is for one process.
        ConnectionError: if a process is gone.
    """
    _check_core(agent.ranks, agent.core)
    done = {"num_timesteps": agent.num_timesteps, "n_updates": agent._n_updates}
    agent.ranks.check_same(done | numbers)
    agent.ranks.agree(agent.policy, agent.order)
    if not agent.ranks.writes:
        agent.set_logger(Logger(folder=None, output_formats=[]))


def _check_core(ranks: Ranks, core: TransformerSpec) -> None:
    if isinstance(core.kernel, Routing) and ranks.count > 1:
        raise ValueError(
            f"{core.kernel} moves its centroids by the tokens that one process reads, and here are "
            f"{ranks.count}: take another kernel, or start it without torchrun"
        )
