"""Gymnasium's vector environments of torch tensors, for agents on their device and as SB3's `VecEnv`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import ModuleType
from typing import Any, overload

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn
from torch import Tensor

from rlxf.envs.spaces import check_spaces, map_parts
from rlxf.envs.tensor_checks import TensorChecks
from rlxf.envs.vector import GymnasiumVecEnv
from rlxf.utils.dtypes import torch_dtype
from rlxf.utils.errors import FaultyEnvironmentError

Info = dict[str, Any]


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


class SparseInfos(Sequence[Info]):
    """Infos of N environments, of which few are not empty.

    Args:
        num_envs: N.
        rows: the infos that are not empty, by the number of their environment.
    """

    def __init__(self, num_envs: int, rows: dict[int, Info]):
        self._num_envs, self.rows = num_envs, rows

    def __len__(self) -> int:
        return self._num_envs

    @overload
    def __getitem__(self, i: int) -> Info: ...
    @overload
    def __getitem__(self, i: slice) -> list[Info]: ...
    def __getitem__(self, i: int | slice) -> Info | list[Info]:
        """Return the info of an environment; an empty one is a new dict."""
        numbers = range(self._num_envs)[i]
        if isinstance(numbers, int):
            return self.rows.get(numbers, {})
        return [self.rows.get(number, {}) for number in numbers]


@dataclass(frozen=True, eq=False)
class TensorStep:
    """Results of a step of N environments, as tensors on their device.

    Args:
        observations: (N, ...), before the next step.
        rewards: (N,) float32.
        ends: (N,) bool, whether the episode ended with the step.
        truncated: (N,) bool, whether it was truncated and not terminated.
        last: (N, ...), of which the rows ``ends`` are the last observations of their episodes.
        filler_next: (N,) bool, whether the next step is a reset step (NEXT_STEP).
        infos: infos as in `GymnasiumVecEnv`, with tensors as terminal observations. Of the infos of the
            environments they contain only ``is_success``.
        valid: False if a number is not finite, or an observation is outside of its space.
        has_truncated: True if any episode was truncated.
    """

    observations: Any
    rewards: Tensor
    ends: Tensor
    truncated: Tensor
    last: Any
    filler_next: Tensor
    infos: SparseInfos
    valid: bool
    has_truncated: bool

    @property
    def dones(self) -> NDArray[np.bool_]:
        """Return ``ends`` as an array (N,), from ``infos``, so that nothing is copied from the device."""
        dones = np.zeros(len(self.infos), np.bool_)
        dones[[i for i, info in self.infos.rows.items() if "episode" in info]] = True
        return dones


class TensorVecEnv(GymnasiumVecEnv):
    """Gymnasium `VectorEnv` whose observations, rewards and done flags are tensors on one device.

    `step_tensors` takes and returns tensors. It copies three flags to the host in each step, and the returns
    and lengths of episodes in steps in which one ends. `GTrXLPPO` calls it in rollouts, if there is no
    wrapper around this class.

    `reset` and `step` convert actions and results, so all tools of Stable-Baselines3 can use the environments
    as a `VecEnv` with the properties of `GymnasiumVecEnv`.

    Autoreset modes are those of `GymnasiumVecEnv`. With SAME_STEP, ``infos["final_obs"]`` must hold a tensor
    (N, ...) of observations, or a dict of them, in each step that ends an episode. A tensor (N,)
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

    @torch.no_grad()
    def step_tensors(self, actions: Tensor) -> TensorStep:
        """Step all environments with actions (N, ...) in the format of their space, without gradients."""
        self.calls += 1
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        self._checks.check_observations("observations", observations)
        self._checks.check_results(rewards, terminated, truncated)
        observations, rewards = map_parts(observations, torch.detach), rewards.detach()
        terminated, truncated = terminated.bool(), truncated.bool()
        ends, truncated = terminated | truncated, truncated & ~terminated
        flags = self._checks.valid(observations, rewards), ends.any(), truncated.any()
        valid, has_ends, has_truncated = torch.stack(flags).tolist()
        if self._filler_rows:
            rewards = rewards.masked_fill(self.filler_next, 0)
        rows = self._count_step(rewards)
        last = None
        if has_ends:
            if self.env.metadata["autoreset_mode"] is AutoresetMode.DISABLED:  # the reset may overwrite them
                observations, rewards, infos = self._copies(observations, rewards, infos)
            stepped = observations
            observations, last, last_infos = self._finish(observations, infos, ends)
            self._checks.check_observations("last observations", last)
            if observations is not stepped:  # environments without autoreset were reset
                self._checks.check_observations("first observations", observations)
                valid = valid and bool(self._checks.valid(observations, rewards))
            rows |= self._end_episodes(ends, truncated, last, last_infos)
        return TensorStep(
            observations=observations,
            rewards=rewards.float(),
            ends=ends,
            truncated=truncated,
            last=last,
            filler_next=self.filler_next,
            infos=SparseInfos(self.num_envs, rows),
            valid=valid,
            has_truncated=has_truncated,
        )

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
        step = self.step_tensors(torch.as_tensor(self._actions, device=self.device))
        infos = list(step.infos)
        for info in step.infos.rows.values():
            if "terminal_observation" in info:
                info["terminal_observation"] = to_numpy(self.observation_space, info["terminal_observation"])
        self.last_observation = to_numpy(self.observation_space, step.observations)
        return self.last_observation, step.rewards.cpu().numpy().copy(), step.dones, infos

    def ignore_bounds(self) -> None:
        """Do not report observations outside of their space, unless they are not finite."""
        self._checks.ignore_bounds()

    def load_counts(self, counts: dict[str, Any]) -> None:
        """Load the result of `counts`."""
        device = self.device
        self._returns = torch.tensor(counts["returns"], dtype=torch.float64, device=device)
        self._lengths = torch.tensor(counts["lengths"], device=device)
        self.filler_next = torch.tensor(counts["filler"], device=device)
        self._filler_rows = np.flatnonzero(counts["filler"]).tolist()

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
