"""Environments of a rollout: steps with action tensors, whose results are tensors on the agent's device."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rlxf.agents.common.environment_checks import check_step_results
from rlxf.agents.gtrxl.observations import as_array, map_obs
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.rollout_buffer import RolloutStep, SegmentBuffer
from rlxf.envs.batch_checks import check_finite, may_reuse_arrays, warn_of_reused_arrays
from rlxf.envs.infos import LOST
from rlxf.envs.spaces import numbers_in_space
from rlxf.utils.errors import FaultyEnvironmentError

Info = dict[str, Any]


@dataclass(frozen=True, eq=False)
class StepResults:
    """Results of a step of E environments, as tensors on the agent's device.

    Args:
        obs: observations (E, ...) after the step, as the environments returned them: the first of the next
            episode where an episode ended, or the last with NEXT_STEP.
        rewards: (E,) float32.
        ends: (E,) bool, whether the episode ended with the step.
        truncated: (N,) int64, numbers of the environments whose episode was truncated and not terminated.
        last_obs: observations (N, ...) at the end of these episodes; None with N = 0.
        lost: (E,) bool, the environments that crashed; None if none crashed.
        filler_next: (E,) bool, whether the next step is a reset step.
    """

    obs: Any
    rewards: Tensor
    ends: Tensor
    truncated: Tensor
    last_obs: Any
    lost: Tensor | None
    filler_next: Tensor


class RolloutEnvs(ABC):
    """Environments of a rollout, in the form that the collector needs.

    `step` comes first, then the others with its results. Callbacks run between, with the same results.

    Args:
        env: the environments.
        policy: the policy that acts, which determines the format of actions and the device.
        env_numbers: numbers of the environments among those of all processes, for messages.
    """

    def __init__(self, env: VecEnv, policy: GTrXLPolicy, env_numbers: Sequence[int]):
        self.env = env
        self.policy = policy
        self.env_numbers = env_numbers
        self.device = policy.device

    @abstractmethod
    def step(self, step: RolloutStep) -> tuple[Any, Any, np.ndarray, Sequence[Info]]:
        """Take a step with the sampled actions (E, ...); return observations, rewards, dones and infos.

        Done flags are an array (E,) bool, as callbacks of Stable-Baselines3 expect.

        Raises:
            NumericalError: if an output of the policy is not finite.
        """

    @abstractmethod
    def check(self, obs: Any, rewards: Any, dones: np.ndarray, step: int) -> None:
        """Raise `FaultyEnvironmentError` unless the results are finite and valid; see `check_step_results`.

        Args:
            obs: observations that `step` returned.
            rewards: rewards that `step` returned.
            dones: done flags that `step` returned.
            step: steps that each environment has taken.
        """

    @abstractmethod
    def finished(self, infos: Sequence[Info], dones: np.ndarray) -> tuple[list[Info], np.ndarray]:
        """Return infos, among them those of all episodes that ended in the step, and their done flags."""

    @abstractmethod
    def results(
        self, obs: Any, rewards: Any, dones: np.ndarray, infos: Sequence[Info], step: int
    ) -> StepResults:
        """Return the results of a step as tensors; arguments as in `check`.

        Raises:
            FaultyEnvironmentError: if the last observation of a truncated episode is not finite.
        """

    @abstractmethod
    def check_rollout(self, buffer: SegmentBuffer, obs: Any) -> None:
        """Check the stored steps of the rollout whose results `step` and `check` left on the device.

        Args:
            buffer: the steps of the rollout.
            obs: observations (E, ...) after the last one.

        Raises:
            FaultyEnvironmentError: as `check`, for the first faulty step.
            NumericalError: as `step`, for the first faulty step.
        """


class ArrayEnvs(RolloutEnvs):
    """Environments whose observations, rewards and done flags are NumPy arrays: any ``VecEnv``."""

    _before: Any
    """Observations (E, ...) before the last step, tensors on the device."""

    def step(self, step: RolloutStep) -> tuple[Any, np.ndarray, np.ndarray, list[Info]]:
        """Take a step; actions are copied to the host, and then the outputs are checked without a wait."""
        self._before = step.obs
        actions = self.policy.to_environment(step.actions)
        step.check()
        return self.env.step(actions)

    def check(self, obs: Any, rewards: np.ndarray, dones: np.ndarray, step: int) -> None:
        """Check all results on the host."""
        check_step_results(self.env, obs, rewards, dones, step, self.env_numbers)

    def finished(self, infos: Sequence[Info], dones: np.ndarray) -> tuple[list[Info], np.ndarray]:
        """Return the arguments: a wrapper may report an episode without a done flag."""
        return list(infos), dones

    def results(
        self, obs: Any, rewards: np.ndarray, dones: np.ndarray, infos: Sequence[Info], step: int
    ) -> StepResults:
        """Copy the results to the device."""
        truncated = np.flatnonzero(_marked(infos, dones, "TimeLimit.truncated"))
        lost = np.array([LOST in info for info in infos])
        filler_next = _marked(infos, dones | lost, "filler_next")
        last_obs = self._last_obs(truncated, infos, step)
        if last_obs is not None and may_reuse_arrays(self.env):
            self._check_last_obs(last_obs, obs, truncated, ~filler_next[truncated])
        return StepResults(
            obs,
            self._upload(rewards, torch.float32),
            self._upload(dones, torch.bool),
            self._upload(truncated),
            last_obs,
            self._upload(lost) if lost.any() else None,
            self._upload(filler_next),
        )

    def check_rollout(self, buffer: SegmentBuffer, obs: Any) -> None:
        """Do nothing: `step` and `check` read everything."""

    def _check_last_obs(self, last: Any, obs: Any, truncated: np.ndarray, was_reset: np.ndarray) -> None:
        """Warn if environments replaced their last observations (N, ...) when they were reset."""
        rows = truncated[was_reset]
        if not len(rows):
            return
        warn_of_reused_arrays(
            self.env,
            map_obs(lambda x: as_array(x)[rows], self._before),
            map_obs(lambda x: x[was_reset], last),
            map_obs(lambda x: x[rows], obs),
        )

    def _last_obs(self, rows: np.ndarray, infos: Sequence[Info], step: int) -> Any:
        """Return the last observations (N, ...) of the episodes that ended in the environments ``rows``."""
        if not len(rows):
            return None
        missing = [int(row) for row in rows if "terminal_observation" not in infos[row]]
        if missing:
            raise FaultyEnvironmentError(
                f"environment {self.env_numbers[missing[0]]} reports a truncation at step {step} without "
                f"info['terminal_observation'], whose value replaces later rewards: add the last observation "
                f"of the episode, as VecEnvs of Stable-Baselines3 do"
            )
        space = self.env.observation_space
        ends = [numbers_in_space(space, _in_space(space, infos[row]["terminal_observation"])) for row in rows]
        last = map_obs(lambda *obs: np.stack(obs), *ends)
        check_finite("last observation", last, step, [self.env_numbers[row] for row in rows])
        return last

    def _upload(self, values: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
        """Return values on the device; the program does not wait for the copy."""
        return torch.as_tensor(values, dtype=dtype).to(self.device, non_blocking=True)


def _in_space(space: spaces.Space[Any], obs: Any) -> Any:
    """Leave out parts of an observation that its Dict space lacks, as ``DummyVecEnv`` does in each step."""
    return {key: obs[key] for key in space} if isinstance(space, spaces.Dict) else obs


def _marked(infos: Sequence[Info], rows: np.ndarray, key: str) -> np.ndarray:
    """Return which environments of ``rows`` (E,) bool have a true ``key`` in their info, (E,) bool."""
    marked = np.zeros(len(rows), np.bool_)
    for row in np.flatnonzero(rows).tolist():
        marked[row] = bool(infos[row].get(key))
    return marked
