"""Calibration of the exit threshold of a GTrXL: early-exit actions are compared with full-depth actions."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from copy import copy
from typing import Any

import numpy as np
import torch
from gymnasium import Env
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.utils import check_for_correct_spaces, set_random_seed
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize
from torch import Tensor

from rlxf.agents.calibration import THRESHOLDS, Calibration, calibratable_exit, check_levels, check_thresholds
from rlxf.agents.gtrxl.config import as_training_env
from rlxf.agents.gtrxl.distributions import same_most_likely_action
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.attention.validation import check_int
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


class CalibrationMixin(BaseAlgorithm):
    """Methods of an agent that calibrate and measure the early exits of its policy."""

    policy: GTrXLPolicy

    def calibrate(
        self,
        env: str | Env[Any, Any] | VecEnv | VectorEnv[Any, Any, Any],
        alpha: float = 0.05,
        delta: float = 0.05,
        thresholds: Sequence[float] = THRESHOLDS,
        episodes: int = 100,
        seed: int | None = None,
    ) -> Calibration:
        """Calibrate and set the exit threshold of `predict`, for a core with depth `CALM`.

        The risk is the expected share of an episode's steps whose most likely early-exit action differs from
        the full-depth action. It is at most ``alpha``, with probability at least ``1 - delta`` over the
        sampled episodes. The expectation is over episodes that the agent plays at full depth, with equal
        weight for short and long episodes. Box actions count as the same if they differ by at most half a
        standard deviation of the policy. The threshold is saved with the agent. It is valid only for the
        current weights: training resets it, with a warning.

        Source: Schuster et al. 2022, arXiv:2207.07061, section 3.2 ("textual consistency"); Learn then Test:
        Angelopoulos et al. 2021, arXiv:2110.01052.

        Args:
            env: environment to act in, other than the training environment, or an id, whose environment is
                closed at the end. Observations are normalized as in training.
            alpha: bound on the risk, the expected share of steps with different actions.
            delta: probability with which the guarantee may fail.
            thresholds: confidence thresholds in decreasing order from 1 to 0, the safest first.
            episodes: minimum number of episodes, in equal shares of the environments.
            seed: seed of the environments and of torch's global generator, which samples the actions; None
                to leave them unchanged.

        Returns:
            The results of each threshold.

        Raises:
            ValueError: before the first step, if the core has another depth, memory persists across episodes,
                the environment has other spaces, thresholds do not decrease, or thresholds, alpha, delta or
                episodes are out of range.
            TypeError: if one of them is not a number.
        """
        check_independent_episodes(self.policy)
        depth, candidates = calibratable_exit(self.policy.transformer), tuple(thresholds)
        check_thresholds(candidates)
        check_levels(alpha, delta)
        check_int("episodes", episodes)
        vec_env = self._wrap_env(as_training_env(env, self.n_envs, seed), verbose=0, monitor_wrapper=False)
        with closing(vec_env) if isinstance(env, str) else nullcontext(), restored(depth.threshold):
            check_for_correct_spaces(vec_env, self.observation_space, self.action_space)
            if seed is not None:
                set_random_seed(seed)
                vec_env.seed(seed)
            self.policy.set_training_mode(False)
            normalization = None if unwrap_vec_normalize(vec_env) else self.get_vec_normalize_env()
            rollout = CalibrationRollout(self.policy, vec_env, candidates, normalization)
            losses = rollout.losses(episodes)
        calibration = Calibration.of(candidates, losses, rollout.passes, alpha, delta)
        depth.threshold.fill_(calibration.threshold)
        return calibration

    def mean_predict_depth(self) -> float | None:
        """Return the mean number of passes per token in `predict` since the last call.

        The start of `evaluate` also resets the count.

        None if the core has no adaptive depth, or nothing was predicted. See `ACT`, `CALM`, `DepthAdaptive`.
        """
        depth = self.policy.transformer.acting_depth()
        return None if depth is None else depth.item()
