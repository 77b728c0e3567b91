"""Calibration of the exit threshold of a GTrXL: early-exit actions are compared with full-depth actions."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rlxf.agents.common.calibration import calibratable_exit
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.envs.infos import is_filler
from rlxf.evaluation.rollout import play


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
    episodes: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the loss of each episode and threshold, (N, K), and the mean depth of each threshold, (K,).

    The loss is the fraction of the episode's steps whose most likely early-exit action differs from the most
    likely full-depth action; see `ActionHead.same_most_likely_action`.

    Args:
        policy: policy whose depth is `CALM`. It is switched to evaluation mode; its exit threshold is
            restored at the end.
        env: environments to act in, with observations as in training; they are reset.
        thresholds: confidence thresholds, the safest first.
        episodes: minimum number N of episodes, in equal shares of the environments.
    """
    policy.set_training_mode(False)
    threshold = calibratable_exit(policy.transformer).threshold
    before = threshold.clone()
    try:
        actor = ExitComparison(policy, env.num_envs, thresholds)
        return episode_losses(actor, env, -(-episodes // env.num_envs)), actor.mean_passes
    finally:
        threshold.copy_(before)


def episode_losses(actor: "ExitComparison", env: VecEnv, episodes_per_env: int) -> NDArray[np.float64]:
    """Return the fraction of steps with a different action for each episode and threshold.

    The result is (E * episodes_per_env, K). All E environments contribute equally many episodes, so that
    short episodes are not overrepresented.
    """
    losses: list[list[NDArray[np.float64]]] = [[] for _ in range(env.num_envs)]
    different, steps = np.zeros((env.num_envs, len(actor.thresholds))), np.zeros(env.num_envs)
    for _, dones, infos in play(actor, env, deterministic=False):
        real = ~is_filler(infos)
        different += actor.different * real[:, None]
        steps += real
        for row in np.flatnonzero(dones & (steps > 0)).tolist():
            losses[row].append(different[row] / steps[row])
            different[row], steps[row] = 0.0, 0.0
        if min(map(len, losses)) >= episodes_per_env:
            break
    return np.stack([loss for row in losses for loss in row[:episodes_per_env]])


class ExitComparison:
    """Agent in E environments that acts at full depth, and also evaluates early exits at each threshold.

    Hidden states of a token that exits early are copied to the later passes, where later steps attend to
    them. Each threshold therefore has its own recurrent state.

    Args:
        policy: see `measure_exits`.
        n_envs: number of environments E.
        thresholds: see `measure_exits`.

    Attributes:
        different: True where the most likely early-exit action of the last step differs from the most likely
            full-depth action, (E, K); see `ActionHead.same_most_likely_action`.
    """

    different: NDArray[np.bool_]

    def __init__(self, policy: GTrXLPolicy, n_envs: int, thresholds: tuple[float, ...]):
        self.policy = policy
        self.thresholds = thresholds
        self.depth = calibratable_exit(policy.transformer)
        self._full, *self._early = (policy.initial_state(n_envs) for _ in (None, *thresholds))
        self._passes: list[list[float]] = [[] for _ in thresholds]

    @property
    def mean_passes(self) -> NDArray[np.float64]:
        """Mean number of passes at each threshold, (K,)."""
        return np.array([np.mean(passes) for passes in self._passes])

    @torch.no_grad()
    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[NDArray[Any], None]:
        """Sample the full-depth actions of one step, and set `different`; the arguments are those of SB3."""
        obs, _ = self.policy.obs_to_tensor(observation)
        start = torch.as_tensor(episode_start, device=self.policy.device)
        latent, _ = self.policy.act(obs, self._full, self._full.advance(start))
        full = self.policy.heads(latent)[0]
        same = [self._step_early_exit(k, obs, start, full) for k in range(len(self.thresholds))]
        self.different = ~torch.stack(same, dim=1).cpu().numpy()
        actions = full.get_actions(deterministic)
        for each in (self._full, *self._early):
            each.action = self.policy.encode_actions(actions)
        return self.policy.to_environment(actions), None

    def _step_early_exit(self, k: int, obs: PyTorchObs, start: Tensor, full: Distribution) -> Tensor:
        """Step with early exits at threshold k, which is set; return whether actions are equal, (E,) bool.

        Compared are the most likely actions; see `ActionHead.same_most_likely_action`.
        """
        state = self._early[k]
        self.depth.threshold.fill_(self.thresholds[k])
        early = self.policy.act_early(obs, state, state.advance(start))
        self._passes[k].append(float(self.policy.transformer.pop_mean_acting_depth() or 0.0))
        return self.policy.action_head.same_most_likely_action(self.policy.heads(early)[0], full)
