"""Environments of tensors in a rollout, whose steps need not wait for the device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rlxf.agents.common.environment_checks import check_step_results
from rlxf.agents.common.numerics import numerical_error_context, raise_output_fault
from rlxf.agents.gtrxl.environments import ArrayEnvs, Info, RolloutEnvs, StepResults
from rlxf.agents.gtrxl.observations import map_obs
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.rollout_buffer import RolloutStep, SegmentBuffer
from rlxf.envs.batch_checks import check_finite
from rlxf.envs.tensor_step import TensorStep
from rlxf.envs.tensor_vec_env import TensorVecEnv, to_numpy
from rlxf.export.acting_step import EnvironmentActions
from rlxf.utils.warnings import warn_user


@dataclass(frozen=True, eq=False)
class UnreadStep:
    """Step whose checks are read at the end of the rollout.

    Args:
        number: steps that each environment has taken.
        dones: (E,) bool, done flags that were reported on the host.
        valid: bool () on the device, whether the results of the environments are valid.
        finite: bool () on the CPU, whether the outputs of the policy are finite. It arrives at the next wait.
    """

    number: int
    dones: np.ndarray
    valid: Tensor
    finite: Tensor


class TensorEnvs(RolloutEnvs):
    """Environments whose observations, rewards and done flags are tensors on the agent's device.

    `step` returns the done flags as an array, which needs no further copy from the device. With
    `TensorVecEnv.defers_checks`, a step in which no episode ends does not wait for the device. Invalid
    results and outputs that are not finite are then reported at the end of the rollout, before it is used.

    Raises:
        ValueError: if their device is not that of the agent.
    """

    env: TensorVecEnv
    _acted: RolloutStep
    _step: TensorStep

    def __init__(self, env: TensorVecEnv, policy: GTrXLPolicy, env_numbers: Sequence[int]):
        super().__init__(env, policy, env_numbers)
        self._unread: list[UnreadStep] = []
        if env.device != self.device:
            raise ValueError(
                f"the tensors of {env.env} are on {env.device}, but the agent is on {self.device}: create "
                f"the environments with device={str(self.device)!r}, or the agent with "
                f"device={str(env.device)!r}"
            )

    def step(self, step: RolloutStep) -> tuple[Any, Tensor, np.ndarray, Sequence[Info]]:
        """Take a step; no observation, reward or action leaves the device.

        Observations and rewards are tensors, also for callbacks: arrays would need a copy in each step.

        The outputs are checked after the step, which has already waited, or in `check_rollout`.
        """
        self._acted = step
        self._step = taken = self.env.step_tensors(self._to_environment(step.actions))
        if not self.env.defers_checks:
            step.check()
        return taken.observations, taken.rewards, taken.dones, taken.infos

    def check(self, obs: Any, rewards: Tensor, dones: np.ndarray, step: int) -> None:
        """Check results on the host if `TensorVecEnv` found invalid ones on the device."""
        finite = self._acted.check.finite
        if finite is not None and self.env.defers_checks:
            self._unread.append(UnreadStep(step, dones, self._step.valid, finite))
        elif not self._step.valid:
            self._check_on_host(obs, rewards, dones, step)

    def _check_on_host(self, obs: Any, rewards: Tensor, dones: np.ndarray, step: int) -> None:
        """Copy invalid results to the host and check them; arguments as in `check`."""
        obs = to_numpy(self.env.observation_space, obs)
        check_step_results(self.env, obs, rewards.cpu().numpy(), dones, step, self.env_numbers)
        self.env.ignore_bounds()  # of which the check has warned

    def finished(self, infos: Sequence[Info], dones: np.ndarray) -> tuple[list[Info], np.ndarray]:
        """Return the infos of the episodes that ended, without those of invalid rewards."""
        rows = self._step.infos.rows.values()
        ended = [info for info in rows if "episode" in info and math.isfinite(info["episode"]["r"])]
        return ended, np.ones(len(ended), np.bool_)

    def results(
        self, obs: Any, rewards: Tensor, dones: np.ndarray, infos: Sequence[Info], step: int
    ) -> StepResults:
        """Select the last observations of truncated episodes."""
        result = self._step
        rows = self._none
        last = None
        if truncated := result.truncated_rows:
            rows = torch.tensor(truncated).to(self.device, non_blocking=True)
            last = map_obs(lambda x: x[rows], result.last)
            numbers = [self.env_numbers[row] for row in truncated]
            check_finite("last observation", to_numpy(self.env.observation_space, last), step, numbers)
        return StepResults(obs, rewards, result.ends, rows, last, None, result.filler_next)

    def check_rollout(self, buffer: SegmentBuffer, obs: Any) -> None:
        """Read the checks of all steps at once, and check the faulty steps on the host, in order."""
        steps, self._unread = self._unread[: buffer.step], []
        valid = torch.stack([each.valid for each in steps]).tolist() if steps else []
        for number, (step, is_valid) in enumerate(zip(steps, valid, strict=True)):
            if not step.finite:
                self._raise_output_fault(buffer, number)
            if not is_valid:
                is_last = number + 1 == buffer.step
                after = obs if is_last else map_obs(lambda x, n=number: x[:, n + 1], buffer.obs)
                self._check_stored(step, after, buffer.rewards[:, number], buffer.dones[:, number])

    def _check_stored(self, step: UnreadStep, obs: Any, rewards: Tensor, ends: Tensor) -> None:
        """Check the invalid results of a step.

        Args:
            step: the step.
            obs: observations (E, ...) after it.
            rewards: (E,).
            ends: (E,) bool, whether the episode ended.

        Raises:
            FaultyEnvironmentError: if a number is not finite, or an episode ended without last observations.
        """
        self._check_on_host(obs, rewards, step.dones, step.number)
        if (ends.cpu().numpy() != step.dones).any():
            raise self.env.missing_last_observations()

    def _raise_output_fault(self, buffer: SegmentBuffer, step: int) -> None:
        """Raise NumericalError for outputs of a step that are not finite; the message names the cause.

        Recurrent states are those of the last step: NaN remains in them.

        Args:
            buffer: the steps of the rollout.
            step: number of the step in the rollout.
        """
        obs = map_obs(lambda x: x[:, step], buffer.obs)
        tokens = self.policy.tokens(obs, buffer.previous[:, step])
        with numerical_error_context(f"step {step} of the rollout"):
            raise_output_fault(self.policy, tokens, None, lambda: self._acted.recurrent)

    @cached_property
    def _none(self) -> Tensor:
        return torch.zeros(0, dtype=torch.long, device=self.device)

    @cached_property
    def _to_environment(self) -> EnvironmentActions:
        """Conversion of actions on the device, as `GTrXLPolicy.to_environment` does on the host."""
        return EnvironmentActions(self.policy.action_space).to(self.device)


def rollout_envs(env: VecEnv, policy: GTrXLPolicy, env_numbers: Sequence[int]) -> RolloutEnvs:
    """Return the environments in the form for the collector; arguments as in `RolloutEnvs`.

    Raises:
        ValueError: if environments with tensors are not on the agent's device.

    Warns:
        UserWarning: if a wrapper converts the tensors of environments to arrays.
    """
    if isinstance(env, TensorVecEnv):
        return TensorEnvs(env, policy, env_numbers)
    if isinstance(env.unwrapped, TensorVecEnv):
        warn_user(
            f"{type(env).__name__} computes with NumPy arrays, so observations are copied from the device "
            f"and back in each step: use a wrapper for tensors inside of the VectorEnv instead"
        )
    return ArrayEnvs(env, policy, env_numbers)
