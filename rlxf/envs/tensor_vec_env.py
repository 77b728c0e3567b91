"""Gymnasium's vector environments of torch tensors, for agents on their device and as SB3's `VecEnv`."""

import time
from operator import itemgetter
from types import ModuleType
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn
from torch import Tensor

from rlxf.envs.spaces import check_spaces, map_parts
from rlxf.envs.tensor_checks import TensorChecks
from rlxf.envs.tensor_step import Info, SparseInfos, TensorStep
from rlxf.envs.vector import GymnasiumVecEnv, last_observations
from rlxf.utils.dtypes import torch_dtype
from rlxf.utils.errors import FaultyEnvironmentError


def as_vec_env(env: VectorEnv) -> VecEnv:
    """Return ``env`` as a Stable-Baselines3 ``VecEnv``: `TensorVecEnv` if it gives tensors.

    An environment gives tensors if it, or the environment in one of its wrappers, has an attribute
    ``device``, as simulators on GPUs have. Gymnasium's ``ArrayConversion`` and its subclasses, such as
    ``NumpyToTorch``, give tensors if they convert to torch.
    """
    return GymnasiumVecEnv(env) if _declared_device(env) is _NONE else TensorVecEnv(env)


_NONE = object()


def _declared_device(env: Any) -> Any:
    """Return the device that a vector environment or one of its wrappers declares for its tensors.

    Returns:
        The attribute ``device``, or the target of a conversion to torch, where None is torch's default
        device. `_NONE` if nothing is declared, or a conversion to another library comes first.
    """
    while not _is_conversion(env) and not hasattr(env, "device"):
        if not hasattr(env, "env"):
            return _NONE
        env = env.env
    return _target_device(env) if _is_conversion(env) else env.device


def _is_conversion(env: Any) -> bool:
    """Return whether ``env`` is an ``ArrayConversion`` of Gymnasium.

    The class is compared by name. Its import needs ``array-api-compat``, which is not a dependency of rlxf.
    """
    return any(base.__name__ == "ArrayConversion" for base in type(env).__mro__)


def _target_device(conversion: Any) -> Any:
    """Return the device of the tensors of an ``ArrayConversion``; `_NONE` if it does not convert to torch."""
    if not _is_torch(conversion._target_xp):
        return _NONE
    if conversion._target_device is None and _is_torch(conversion._env_xp):  # tensors stay where they are
        inner = _declared_device(conversion.env)
        return None if inner is _NONE else inner
    return conversion._target_device


def _is_torch(library: ModuleType) -> bool:
    """Return whether a module of arrays is torch, or its compatible form in ``array_api_compat``."""
    return library.__name__ in ("torch", "array_api_compat.torch")


def to_numpy(space: spaces.Space[Any], observations: Any) -> Any:
    """Return a copy of observation tensors as arrays with the dtypes of their space."""
    if isinstance(space, spaces.Dict):
        return {key: to_numpy(part, observations[key]) for key, part in space.items()}
    return observations.detach().to(torch_dtype(space.dtype)).cpu().numpy().copy()


class TensorVecEnv(GymnasiumVecEnv):
    """Gymnasium `VectorEnv` whose observations, rewards and done flags are tensors on one device.

    `step_tensors` takes and returns tensors. It copies two flags to the host in each step, and the numbers of
    all episodes in steps in which one ends; with `defers_checks` only the latter. `GTrXLPPO` calls it in
    rollouts, if there is no wrapper around this class.

    `reset` and `step` convert actions and results, so all tools of Stable-Baselines3 can use the environments
    as a `VecEnv` with the properties of `GymnasiumVecEnv`.

    Autoreset modes are those of `GymnasiumVecEnv`. With SAME_STEP, ``infos["final_obs"]``, or with the key of
    ManiSkill ``infos["final_observation"]``, must hold a tensor (N, ...) of observations, or a dict of them,
    in each step that ends an episode. In other steps it may be missing, None, or such a tensor. A tensor (N,)
    ``is_success`` in ``infos``, or with SAME_STEP in ``infos["final_info"]``, is reported with the episode.

    Args:
        env: the vector environment. If it declares a device (see `as_vec_env`), this is the device of all
            tensors, else torch's default device. Tensors may be overwritten by the next step or reset, and
            may require gradients, which are not used.

    Raises:
        TypeError: if env is not a `VectorEnv` or a space is not supported (`check_spaces`).
        ValueError: if env declares no autoreset mode.
        FaultyEnvironmentError: from `reset` and steps, if a tensor has the wrong device, dtype or shape, env
            returns arrays, or env resets in the same step without ``final_obs``.
    """

    filler_next: Tensor
    _returns: Tensor
    _lengths: Tensor
    _filler_rows: list[int]
    """Numbers of the environments whose next step is a reset step."""

    def __init__(self, env: VectorEnv):
        declared = _declared_device(env)
        self.device = torch.empty(0, device=None if declared is _NONE else declared).device
        super().__init__(env)
        check_spaces(env.single_observation_space, env.single_action_space)
        self._checks = TensorChecks(str(env), env.single_observation_space, env.num_envs, self.device)

    def reset(self) -> VecEnvObs:
        """Return the first observations as arrays, with the seed and options set before."""
        observations, _ = self._reset_env()
        self._check_arrays(observations)
        self._checks.check_observations("first observations", observations)
        self.reset_infos = [{} for _ in range(self.num_envs)]
        self.last_observation = to_numpy(self.observation_space, observations)
        return self.last_observation

    def _keep_reset_infos(self, infos: dict[str, Any], first: Any) -> None:
        """Do nothing: infos stay on the device, and ``reset_infos`` is empty."""

    def _check_arrays(self, observations: Any) -> None:
        """Raise if the vector environment returns arrays, which need a `GymnasiumVecEnv`."""
        parts = observations.values() if isinstance(observations, dict) else [observations]
        if all(isinstance(part, np.ndarray) for part in parts):
            raise FaultyEnvironmentError(
                f"{self.env} returns NumPy arrays, but TensorVecEnv needs tensors on {self.device}: pass "
                f"rlxf.envs.GymnasiumVecEnv(env)"
            )

    @property
    def defers_checks(self) -> bool:
        """Return whether steps without ``final_obs`` do not wait for the device.

        The caller of `step_tensors` then has to read `TensorStep.valid` later. The device must be an
        accelerator, as reading costs nothing on the CPU. With NEXT_STEP, and without autoreset, the host has
        to know in each step whether an episode ended. Choices outside of their space are never deferred: as
        an index on a GPU, they would end the process.
        """
        mode = self.env.metadata["autoreset_mode"]
        is_accelerator = self.device.type != "cpu"
        return is_accelerator and mode is AutoresetMode.SAME_STEP and self._checks.only_boxes

    def step_tensors(self, actions: Tensor) -> TensorStep:
        """Step all environments with actions (N, ...) in the format of their space, without gradients."""
        return self._step(actions, self.defers_checks)

    @torch.no_grad()
    def _step(self, actions: Tensor, deferred: bool) -> TensorStep:
        """Step all environments as `step_tensors` does.

        Args:
            actions: (N, ...).
            deferred: take it from ``final_obs``, not from the device, whether an episode may have ended.
        """
        self.calls += 1
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        self._checks.check_observations("observations", observations)
        self._checks.check_results(rewards, terminated, truncated)
        observations, rewards = map_parts(observations, torch.detach), rewards.detach()
        terminated, truncated = terminated.bool(), truncated.bool()
        ends, truncated = terminated | truncated, truncated & ~terminated
        if self._filler_rows:
            rewards = rewards.masked_fill(self.filler_next, 0)
        valid, may_end = self._read_flags(self._checks.valid(observations, rewards), ends, infos, deferred)
        rows = self._count_step(rewards)
        last = None
        if may_end:
            if self.env.metadata["autoreset_mode"] is AutoresetMode.DISABLED:  # the reset may overwrite them
                observations, rewards, infos = self._copies(observations, rewards, infos)
            stepped = observations
            observations, last, last_infos = self._finish(observations, infos, ends)
            self._checks.check_observations("last observations", last)
            if observations is not stepped:  # environments without autoreset were reset
                self._checks.check_observations("first observations", observations)
                valid = valid & self._checks.valid(observations, rewards).cpu()
            rows |= self._end_episodes(ends, truncated, last, last_infos)
        return TensorStep(
            observations=observations,
            rewards=rewards.float(),
            ends=ends,
            last=last,
            filler_next=self.filler_next,
            infos=SparseInfos(self.num_envs, rows),
            valid=valid,
        )

    def _read_flags(self, valid: Tensor, ends: Tensor, infos: Info, deferred: bool) -> tuple[Tensor, bool]:
        """Return whether the results of a step are valid, bool (), and whether an episode may have ended.

        Args:
            valid: bool (), whether the numbers are valid.
            ends: (N,) bool, whether the episode ended.
            infos: infos of the vector environment.
            deferred: see `_step`.
        """
        if not deferred:
            valid, has_ends = torch.stack([valid, ends.any()]).cpu()
            return valid, bool(has_ends)
        has_last = last_observations(infos) is not None
        return (valid if has_last else valid & ~ends.any()), has_last

    def _copies(self, observations: Any, rewards: Tensor, infos: Info) -> tuple[Any, Tensor, Info]:
        """Return copies of the results of a step; of the infos, they contain only ``is_success``."""
        names = infos.keys() & {"is_success"}
        successes = {name: self._checks.successes(infos[name]).clone() for name in names}
        return map_parts(observations, torch.clone), rewards.clone(), successes

    def _count_step(self, rewards: Tensor) -> dict[int, Info]:
        """Add a step to returns and lengths of the episodes, and return the infos of reset steps."""
        self._returns, self._lengths = self._returns + rewards, self._lengths + ~self.filler_next
        rows: dict[int, Info] = {i: {"filler": True} for i in self._filler_rows}
        self.filler_next = torch.zeros_like(self.filler_next)
        self._filler_rows = []
        return rows

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments, with actions and results as arrays."""
        step = self._step(torch.as_tensor(self._actions, device=self.device), deferred=False)
        infos = list(step.infos)
        for info in step.infos.rows.values():
            if "terminal_observation" in info:
                info["terminal_observation"] = to_numpy(self.observation_space, info["terminal_observation"])
        self.last_observation = to_numpy(self.observation_space, step.observations)
        return self.last_observation, step.rewards.cpu().numpy().copy(), step.dones, infos

    def ignore_bounds(self) -> None:
        """Do not report observations outside of their space, unless they are not finite."""
        self._checks.ignore_bounds()

    def load_episode_state(self, state: dict[str, Any]) -> None:
        """Load the result of `episode_state`."""
        device = self.device
        self._returns = torch.tensor(state["returns"], dtype=torch.float64, device=device)
        self._lengths = torch.tensor(state["lengths"], device=device)
        self.filler_next = torch.tensor(state["filler"], device=device)
        self._filler_rows = np.flatnonzero(state["filler"]).tolist()

    def _end_episodes(self, ends: Tensor, truncated: Tensor, last: Any, infos: Info) -> dict[int, Info]:
        """Return the infos of the environments whose episode ended, and clear their counts.

        All numbers are copied to the host at once.
        """
        columns = {"ends": ends, "truncated": truncated, "r": self._returns, "l": self._lengths}
        if "is_success" in infos:
            columns["is_success"] = self._checks.successes(infos["is_success"])
        numbers = torch.stack([column.double() for column in columns.values()]).cpu().numpy()
        host = dict(zip(columns, numbers, strict=True))
        self._returns, self._lengths = (
            self._returns.masked_fill(ends, 0.0),
            self._lengths.masked_fill(ends, 0),
        )
        ended = np.flatnonzero(host["ends"]).tolist()
        rows = {i: self._end_info(i, host) for i in ended}
        for i, row in rows.items():
            row["terminal_observation"] = map_parts(last, itemgetter(i))
        if self.env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP:
            self._filler_rows = ended
        return rows

    def _end_info(self, i: int, host: dict[str, np.ndarray]) -> Info:
        """Return the info of an episode that ended in environment i; ``host`` contains arrays (N,)."""
        seconds = round(time.time() - self._started, 6)
        info: Info = {
            "TimeLimit.truncated": bool(host["truncated"][i]),
            "episode": {"r": float(host["r"][i]), "l": int(host["l"][i]), "t": seconds},
        }
        if "is_success" in host:
            info["is_success"] = bool(host["is_success"][i])
        if self.env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP:
            info["filler_next"] = True
        return info

    def _clear_episodes(self) -> None:
        self._returns = torch.zeros(self.num_envs, dtype=torch.float64, device=self.device)
        self._lengths = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self.filler_next = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self._filler_rows = []
