"""Calibration of the exit threshold of a GTrXL: early-exit actions are compared with full-depth actions."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from torch import Tensor

from rlxf.agents.calibration import calibratable_exit
from rlxf.agents.gtrxl.heads import same_most_likely_action
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.envs.batches import is_filler


class CalibrationRollout:
    """Rollout at full depth that also evaluates early exits at each threshold.

    Hidden states of a token that exits early are copied to the later passes, where later steps attend to
    them. Each threshold therefore has its own recurrent state.

    Args:
        policy: policy whose depth is `CALM`.
        env: environments to act in; they are reset.
        thresholds: confidence thresholds, the safest first.
        normalization: statistics that normalize observations as in training; None if they are already
            normalized, or the agent uses raw ones.
    """

    def __init__(
        self,
        policy: GTrXLPolicy,
        env: VecEnv,
        thresholds: tuple[float, ...],
        normalization: VecNormalize | None,
    ):
        self.policy, self.env, self.thresholds, self.normalization = policy, env, thresholds, normalization
        self.depth = calibratable_exit(policy.transformer)
        self._full, *self._early = (policy.initial_state(env.num_envs) for _ in (None, *thresholds))
        self._obs: Any = env.reset()
        self._start = np.ones(env.num_envs, np.bool_)
        self._different = np.zeros((env.num_envs, len(thresholds)))
        self._steps = np.zeros(env.num_envs)
        self._passes: list[list[float]] = [[] for _ in thresholds]

    def losses(self, episodes: int) -> NDArray[np.float64]:
        """Return the share of steps with a different action for each episode and threshold, (episodes, K).

        All environments contribute the same number of episodes, so that short episodes are not
        overrepresented.
        """
        each = -(-episodes // self.env.num_envs)
        losses: list[list[NDArray[np.float64]]] = [[] for _ in range(self.env.num_envs)]
        while min(map(len, losses)) < each:
            dones = self._step()
            for row in np.flatnonzero(dones & (self._steps > 0)).tolist():
                losses[row].append(self._different[row] / self._steps[row])
                self._different[row], self._steps[row] = 0.0, 0.0
        return np.stack([loss for row in losses for loss in row[:each]])

    @property
    def passes(self) -> NDArray[np.float64]:
        """Mean number of passes at each threshold, (K,)."""
        return np.array([np.mean(taken) for taken in self._passes])

    @torch.no_grad()
    def _step(self) -> NDArray[np.bool_]:
        """Take a step in every environment, and return whether its episode ended, (E,) bool."""
        raw = self._obs if self.normalization is None else self.normalization.normalize_obs(self._obs)
        obs, _ = self.policy.obs_to_tensor(raw)
        start = torch.as_tensor(self._start, device=self.policy.device)
        latent, _ = self.policy.act(obs, self._full, self._full.advance(start))
        full = copy(self.policy.heads(latent)[0])
        different = torch.stack([~self._same(number, obs, start, full) for number in range(len(self._early))])
        actions = full.get_actions()
        for state in (self._full, *self._early):
            state.action = self.policy.encode_actions(actions)
        self._obs, _, dones, infos = self.env.step(self.policy.to_environment(actions))
        real = ~is_filler(infos)
        self._different += different.T.cpu().numpy() * real[:, None]
        self._steps += real
        self._start = dones | ~real
        return dones

    def _same(self, number: int, obs: PyTorchObs, start: Tensor, full: Distribution) -> Tensor:
        """Return whether the early-exit action at a threshold equals the full-depth action, (E,) bool."""
        state = self._early[number]
        self.depth.threshold.fill_(self.thresholds[number])
        early = self.policy.act_early(obs, state, state.advance(start))
        self._passes[number].append(float(self.policy.transformer.acting_depth() or 0.0))
        return same_most_likely_action(self.policy.heads(early)[0], full)


@contextmanager
def restored(tensor: Tensor) -> Iterator[None]:
    """Restore the values of a tensor at the end of the context."""
    before = tensor.clone()
    try:
        yield
    finally:
        tensor.copy_(before)


def check_independent_episodes(policy: GTrXLPolicy) -> None:
    """Raise ValueError if the episodes of an agent with this policy are not independent samples."""
    if policy.persist_memory_across_episodes:
        raise ValueError(
            "calibrate requires independent episodes, but with persist_memory_across_episodes=True each "
            "episode depends on the previous ones: choose the threshold of CALM by hand"
        )


def measure_exits(
    policy: GTrXLPolicy,
    env: VecEnv,
    thresholds: tuple[float, ...],
    normalization: VecNormalize | None,
    episodes: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the loss of each episode and threshold, (N, K), and the mean depth of each threshold, (K,).

    Args:
        policy, env, thresholds, normalization: see `CalibrationRollout`. The policy is switched to evaluation
            mode; its exit threshold is restored at the end.
        episodes: minimum number N of episodes, in equal shares of the environments.
    """
    policy.set_training_mode(False)
    with restored(calibratable_exit(policy.transformer).threshold):
        rollout = CalibrationRollout(policy, env, thresholds, normalization)
        return rollout.losses(episodes), rollout.passes
