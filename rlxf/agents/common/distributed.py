"""Distributed training: statistics and settings that all processes of an agent share."""

from typing import Any, Protocol

import numpy as np
import torch
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize

from rlxf.attention import Routing, TransformerSpec
from rlxf.training.distributed.group import ProcessGroup


class SyncedRunningMeanStd(RunningMeanStd):
    """Running mean and variance of the data of all processes, with the same values in each process.

    If a row of any process is not finite, no process updates its statistics. The process with that row then
    stops the training (`rlxf.agents.common.numerics`).

    Args:
        known: current statistics.
        ranks: the process group; each process contributes the same number of rows.
    """

    def __init__(self, known: RunningMeanStd, ranks: ProcessGroup):
        super().__init__()
        self.mean, self.var, self.count = known.mean, known.var, known.count
        self._ranks = ranks

    def update(self, arr: np.ndarray) -> None:
        """Update the statistics with the rows (N, ...) of this process and those of all other processes."""
        every = self._ranks.all_gather(torch.as_tensor(arr)).numpy()
        if np.isfinite(every).all():
            super().update(every)


def sync_normalization_statistics(env: VecEnv | None, ranks: ProcessGroup) -> None:
    """Synchronize the statistics of a ``VecNormalize`` across all processes at every step."""
    normalizer = unwrap_vec_normalize(env)  # type: ignore[arg-type]  # None has none
    if normalizer is None or ranks.count == 1:
        return
    normalizer.ret_rms = SyncedRunningMeanStd(normalizer.ret_rms, ranks)
    if not normalizer.norm_obs:  # then there are no statistics of observations
        return
    if isinstance(normalizer.obs_rms, dict):
        normalizer.obs_rms = {
            key: SyncedRunningMeanStd(each, ranks) for key, each in normalizer.obs_rms.items()
        }
    else:
        normalizer.obs_rms = SyncedRunningMeanStd(normalizer.obs_rms, ranks)


class DistributedAgent(Protocol):
    """Agent that can be trained in several processes."""

    ranks: ProcessGroup
    core: TransformerSpec
    order: torch.Generator
    policy: Any
    num_timesteps: int
    _n_updates: int

    def set_logger(self, logger: Logger) -> None:
        """Set the logger, as in Stable-Baselines3."""


def sync_processes(agent: DistributedAgent, **numbers: int) -> None:
    """Synchronize weights and generators of all processes, and disable the logs of all but one.

    Args:
        agent: the agent before its first step.
        numbers: further numbers that must be equal in all processes, in addition to steps and updates.

    Raises:
        ValueError: if a number differs between processes, or the core supports only one process.
        ConnectionError: if a process has ended.
    """
    _check_core(agent.ranks, agent.core)
    done = {"num_timesteps": agent.num_timesteps, "n_updates": agent._n_updates}
    agent.ranks.check_equal_on_ranks(done | numbers)
    agent.ranks.broadcast_module(agent.policy, agent.order)
    if not agent.ranks.writes:
        agent.set_logger(Logger(folder=None, output_formats=[]))


def _check_core(ranks: ProcessGroup, core: TransformerSpec) -> None:
    if isinstance(core.kernel, Routing) and ranks.count > 1:
        raise ValueError(
            f"{core.kernel} updates its centroids from the tokens of one process, but this training has "
            f"{ranks.count}: use another kernel, or start without torchrun"
        )
