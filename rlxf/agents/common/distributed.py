"""Distributed training: weights, statistics and settings that all processes of an agent share."""

from collections.abc import Callable

import numpy as np
import torch
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize
from torch import nn

from rlxf.attention import TransformerSpec
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
    if normalizer is None or ranks.world_size == 1:
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


def sync_processes(
    ranks: ProcessGroup,
    core: TransformerSpec,
    policy: nn.Module,
    generator: torch.Generator,
    set_logger: Callable[[Logger], None],
    **numbers: int,
) -> None:
    """Synchronize weights and generators of all processes, and disable the logs of all but the first.

    Args:
        ranks: the process group.
        core: spec of the agent's transformer.
        policy: network of the agent; all processes get the weights of the first one.
        generator: generator of minibatches; all processes get the state of the first one.
        set_logger: method of the agent that replaces its logger.
        numbers: numbers that must be equal in all processes, e.g. the steps to train for.

    Raises:
        ValueError: if a number differs between processes, or the core supports only one process.
        ConnectionError: if a process has ended.
    """
    core.kernel.check_processes(ranks.world_size)
    ranks.check_equal_on_ranks(numbers)
    ranks.broadcast_module(policy, generator)
    if not ranks.is_main:
        set_logger(Logger(folder=None, output_formats=[]))
