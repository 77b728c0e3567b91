"""A training that several processes share: what an agent needs for that."""

from typing import Any, Protocol

import numpy as np
import torch
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize

from rlxf.attention import Routing, TransformerSpec
from rlxf.training.ranks import Ranks


class AgreedMeanStd(RunningMeanStd):
    """Statistics of what all processes see, kept by each of them.

    Rows with a number that is not finite spoil none of them: nobody takes in what was given at that moment,
    and the process that gave it ends the training (`rlxf.agents.guards`).

    Args:
        known: those so far.
        ranks: the processes; each gives as many rows at a time.
    """

    def __init__(self, known: RunningMeanStd, ranks: Ranks):
        super().__init__()
        self.mean, self.var, self.count = known.mean, known.var, known.count
        self._ranks = ranks

    def update(self, arr: np.ndarray) -> None:
        """Take in this one's rows (N, ...), and those that the others give at the same moment."""
        every = self._ranks.gathered(torch.as_tensor(arr)).numpy()
        if np.isfinite(every).all():
            super().update(every)


def agreed_statistics(env: VecEnv | None, ranks: Ranks) -> None:
    """Let a ``VecNormalize`` of several processes normalise by what all of them see, step by step."""
    normalizer = unwrap_vec_normalize(env)  # type: ignore[arg-type]  # None has none
    if normalizer is None or ranks.count == 1:
        return
    normalizer.ret_rms = AgreedMeanStd(normalizer.ret_rms, ranks)
    if not normalizer.norm_obs:  # then it has none of observations
        return
    if isinstance(normalizer.obs_rms, dict):
        normalizer.obs_rms = {key: AgreedMeanStd(each, ranks) for key, each in normalizer.obs_rms.items()}
    else:
        normalizer.obs_rms = AgreedMeanStd(normalizer.obs_rms, ranks)


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
