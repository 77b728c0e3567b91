"""Where a GTrXL would have done something else, had it left early."""

from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from torch import Tensor

from rlxf.agents.calibration import Calibration, confidence_of
from rlxf.agents.gtrxl.distributions import would_do_the_same
from rlxf.agents.gtrxl.policy import GTrXLPolicy

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.ppo import GTrXLPPO


class Rehearsal:
    """Plays with all passes; beside it go as many memories as thresholds, each of what leaves at its own.

    What left early is copied to later passes, where later steps see it: so each threshold needs its own past.

    Args:
        policy: its depth is `CALM`.
        env: it is reset.
        thresholds: the safest first.
        normalization: brings observations to those of training; None if they are.
    """

    def __init__(
        self,
        policy: GTrXLPolicy,
        env: VecEnv,
        thresholds: tuple[float, ...],
        normalization: VecNormalize | None,
    ):
        self.policy, self.env, self.thresholds, self.normalization = policy, env, thresholds, normalization
        self.depth = confidence_of(policy.transformer)
        self._full, *self._early = (policy.begin(env.num_envs) for _ in (None, *thresholds))
        self._obs: Any = env.reset()
        self._start = np.ones(env.num_envs, np.bool_)
        self._other = np.zeros((env.num_envs, len(thresholds)))
        self._steps = np.zeros(env.num_envs)
        self._passes: list[list[float]] = [[] for _ in thresholds]

    def losses(self, episodes: int) -> NDArray[np.float64]:
        """Share of the steps of each episode with another action, (episodes, K).

        Each environment plays its share of them, so that short ones are not favoured.
        """
        each = -(-episodes // self.env.num_envs)
        found: list[list[NDArray[np.float64]]] = [[] for _ in range(self.env.num_envs)]
        while min(map(len, found)) < each:
            dones = self._step()
            for row in np.flatnonzero(dones & (self._steps > 0)).tolist():
                found[row].append(self._other[row] / self._steps[row])
                self._other[row], self._steps[row] = 0.0, 0.0
        return np.stack([loss for row in found for loss in row[:each]])

    @property
    def passes(self) -> NDArray[np.float64]:
        """Taken on average at each threshold, (K,)."""
        return np.array([np.mean(taken) for taken in self._passes])

    @torch.no_grad()
    def _step(self) -> NDArray[np.bool_]:
        """One step of every environment; who ended."""
        raw = self._obs if self.normalization is None else self.normalization.normalize_obs(self._obs)
        obs, _ = self.policy.obs_to_tensor(raw)
        start = torch.as_tensor(self._start, device=self.policy.device)
        latent, _ = self.policy.act(obs, self._full, self._full.advance(start))
        full = copy(self.policy.heads(latent)[0])
        other = torch.stack([~self._same(number, obs, start, full) for number in range(len(self._early))])
        actions = full.get_actions()
        for acting in (self._full, *self._early):
            acting.action = self.policy.encode_actions(actions)
        self._obs, _, dones, infos = self.env.step(self.policy.to_environment(actions))
        real = ~np.array([info.get("filler", False) for info in infos], np.bool_)
        self._other += other.T.cpu().numpy() * real[:, None]
        self._steps += real
        self._start = dones | ~real
        return dones

    def _same(self, number: int, obs: PyTorchObs, start: Tensor, full: Distribution) -> Tensor:
        """(E,) bool: whether leaving at a threshold changes nothing."""
        acting = self._early[number]
        self.depth.threshold.fill_(self.thresholds[number])
        early = self.policy.act_early(obs, acting, acting.advance(start))
        self._passes[number].append(float(self.policy.transformer.acting_depth() or 0.0))
        return would_do_the_same(self.policy.heads(early)[0], full)


def calibrated(rehearsal: Rehearsal, episodes: int, alpha: float, delta: float) -> Calibration:
    """What came of each threshold; the one that there was stays if this fails."""
    before = rehearsal.depth.threshold.clone()
    try:
        losses = rehearsal.losses(episodes)
        return Calibration.of(rehearsal.thresholds, losses, rehearsal.passes, alpha, delta)
    finally:
        rehearsal.depth.threshold.copy_(before)


def check_independent(agent: "GTrXLPPO") -> None:
    """Raise ValueError if its episodes are no independent samples of anything."""
    if agent.across_episodes:
        raise ValueError(
            "calibrate promises from episodes that do not depend on one another, and with "
            "across_episodes=True each remembers those before it: choose the threshold of CALM by hand"
        )
