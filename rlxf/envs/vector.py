"""Gymnasium's vector environments as SB3's `VecEnv`, and those whose state can be saved."""

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from rlxf.data.spaces import is_text, leaves
from rlxf.envs.infos import (
    fill_infos,
    final_infos,
    info_of,
    is_episode,
    last_info,
    without_other_episode,
    without_vector_statistics,
)
from rlxf.envs.spaces import check_playable, numbers_in_space, row_of, writable_arrays
from rlxf.utils.errors import EpisodeLostError, FaultyEnvironmentError
from rlxf.utils.warnings import warn_user


def innermost_env(env: VecEnv) -> Any:
    """Return the vector environment inside all wrappers, of Stable-Baselines3 or of Gymnasium."""
    inner: Any = env.unwrapped
    return inner.env.unwrapped if isinstance(inner, GymnasiumVecEnv) else inner


_Mask = NDArray[np.bool_]
"""True for some of the environments, bool (N,)."""
_FINAL_OBS = ("final_obs", "final_observation")
"""Keys of last observations in infos: that of Gymnasium 1.x, and that of Gymnasium 0.29 and ManiSkill."""


@runtime_checkable
class StatefulVectorEnv(Protocol):
    """Interface of a Gymnasium ``VectorEnv`` whose state can be saved and loaded in another process.

    In distributed training, lists in the state with one entry per environment are gathered from and split
    over the ranks. Everything else in the state has to be equal on all ranks.

    Single environments do not need this class: those of `rlxf.envs.make_vec_env` are `ActionReplay`.
    """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state that later steps depend on, with random generators, as JSON without NaN."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Load a `state` without a reset.

        If the environment was created with the same arguments, the same steps follow.
        """


class GymnasiumVecEnv(VecEnv):
    """Stable-Baselines3 `VecEnv` around a Gymnasium 1.x `VectorEnv` of any autoreset mode.

    ``infos[i]`` is a new dict with the info of environment i. On a step that ends its episode, the dict also
    has

    - ``terminal_observation``: the last observation of the episode,
    - ``TimeLimit.truncated``: truncated and not terminated,
    - ``episode``: return ``r``, length ``l`` in steps, seconds ``t`` since the start, as in `Monitor`. If a
      `Monitor` or Gymnasium's ``RecordEpisodeStatistics`` reports the episode, the numbers are those of this
      wrapper, without the wrappers around it; not of the vector wrapper with DISABLED, in which it has an
      error.

    Observations are arrays of NumPy that can be written, also of environments of JAX. Rewards are float32
    (N,), done flags bool (N,).

    The observation of a step that ends an episode depends on ``env.metadata["autoreset_mode"]``:

    - SAME_STEP and DISABLED: the first observation of the next episode, as Stable-Baselines3 expects. With
      DISABLED, this class resets the environments whose episode ended (``options={"reset_mask": ends}``).
    - NEXT_STEP: the last observation of the episode, and ``infos[i]["filler_next"]`` is True: the next step
      of the environment is a reset step. It ignores its action, has reward 0, ends no episode and counts
      in no episode. Its info is ``{"filler": True}``, and it has the first observation of the next episode.
      A learner must mask the transition that starts from the last observation.

    Args:
        env: the vector environment. It must return new arrays in each step (``copy=True``).

    Attributes:
        filler_next: mask of the environments whose next step is a reset step, bool (N,).
        last_observation: observation of the last `step` or `reset`; None before the first, also after
            `load_state`.
        calls: number of calls of `step` and of resets of all environments.

    Raises:
        TypeError: if env is not a `VectorEnv` or a space is not supported (`check_playable`).
        ValueError: if env declares no autoreset mode, or reuses its observation arrays.
        FaultyEnvironmentError: from `reset`, if observations are not of shape (N, ...); from `step`, if env
            resets in the same step without ``final_obs``, or rewards or flags are not of shape (N,).
    """

    filler_next: Any
    _returns: Any
    _lengths: Any

    def __init__(self, env: VectorEnv):
        _check_env(env)
        self.env = env
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
        self._started = time.time()
        self._clear_episodes()
        self.calls = 0
        self.last_observation: Any = None

    def reset(self) -> VecEnvObs:
        """Return the first observations of all environments, with the seed and options set before."""
        observations, infos = self._reset_env()
        self._check_arrays(observations)
        self._keep_reset_infos(infos, np.ones(self.num_envs, np.bool_))
        self.last_observation = writable_arrays(observations)
        return self.last_observation

    def _reset_env(self) -> tuple[Any, dict[str, Any]]:
        """Reset the vector environment with the seed and options set before, and the counts of episodes."""
        self.calls += 1
        seed = None if self._seeds[0] is None else int(self._seeds[0])
        observations, infos = self.env.reset(seed=seed, options=self._common_options())
        self._reset_seeds()
        self._reset_options()
        self._clear_episodes()
        return observations, infos

    def _clear_episodes(self) -> None:
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, dtype=np.int64)
        self.filler_next = np.zeros(self.num_envs, dtype=np.bool_)

    def _check_arrays(self, observations: Any) -> None:
        """Raise for tensors, which need a `TensorVecEnv`, and for observations of some environments only."""
        parts = observations.values() if isinstance(observations, dict) else [observations]
        if any(isinstance(part, torch.Tensor) for part in parts):
            raise FaultyEnvironmentError(
                f"{self.env} returns tensors, but has no attribute 'device': add it, so that the environment "
                f"is recognized, or pass rlxf.envs.TensorVecEnv(env)"
            )
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        shapes = {part.shape for part in arrays if part.shape[:1] != (self.num_envs,)}
        if shapes:
            raise FaultyEnvironmentError(
                f"the first observations of {self.env} must have {self.num_envs} rows, one for each "
                f"environment, got shape {min(shapes)}; with EnvPool, pass batch_size=num_envs"
            )

    def state(self) -> dict[str, Any]:
        """Return the state of the current episodes for `load_state`, as JSON.

        Raises:
            EpisodeLostError: if the vector environment is not `StatefulVectorEnv`.
        """
        return {"env": self._resumable.state(), **self.episode_state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a `state` without a reset."""
        self._resumable.load_state(state["env"])
        self.load_episode_state(state)
        self.last_observation = None

    def episode_state(self) -> dict[str, Any]:
        """Return the returns and lengths of the current episodes, and which are at a reset step, as JSON."""
        return {
            "returns": self._returns.tolist(),
            "lengths": self._lengths.tolist(),
            "filler": self.filler_next.tolist(),
        }

    def load_episode_state(self, state: dict[str, Any]) -> None:
        """Load the result of `episode_state`."""
        self._returns, self._lengths = np.array(state["returns"]), np.array(state["lengths"])
        self.filler_next = np.array(state["filler"])

    @property
    def _resumable(self) -> StatefulVectorEnv:
        if not isinstance(self.env, StatefulVectorEnv):
            raise EpisodeLostError(
                f"{self.env} is not a rlxf.envs.StatefulVectorEnv, so its state cannot be saved"
            )
        return self.env

    def step_async(self, actions: NDArray[Any]) -> None:
        """Keep the actions, (N, ...), for `step_wait`."""
        self.calls += 1
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments; the class docstring describes the results."""
        observations, rewards, terminated, truncated, infos = self.env.step(self._actions)
        rewards = self._checked("rewards", np.asarray(rewards))
        terminated = self._checked("terminations", np.asarray(terminated, np.bool_))
        truncated = self._checked("truncations", np.asarray(truncated, np.bool_))
        ends = terminated | truncated
        has_fillers = self.filler_next.any()
        if has_fillers:  # environments of Gymnasium with jax, and wrappers, return other rewards
            rewards = np.where(self.filler_next, 0, rewards)
        self._returns += rewards
        self._lengths += ~self.filler_next
        rows: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if infos:
            fill_infos(rows, without_other_episode(infos), ~(self.filler_next | ends))
        if has_fillers:
            self._mark(rows, "filler")
            self._keep_reset_infos(infos, self.filler_next)
        self.filler_next = np.zeros(self.num_envs, dtype=np.bool_)
        if ends.any():
            observations, last, last_infos = self._finish(observations, infos, ends)
            self._record_ends(rows, ends, last, last_infos, truncated & ~terminated)
            self._mark(rows, "filler_next")
        self.last_observation = writable_arrays(observations)
        return self.last_observation, rewards.astype(np.float32), ends, rows

    def _checked(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Return an array of a step; raise FaultyEnvironmentError unless it has one value per environment."""
        if values.shape != (self.num_envs,):
            raise FaultyEnvironmentError(
                f"{name} of {self.env} must be an array of shape {(self.num_envs,)}, got shape "
                f"{values.shape}; correct the environment, or wrap it"
            )
        return values

    def close(self) -> None:
        """Close the vector environment."""
        self.env.close()

    def get_images(self) -> list[Any]:
        """Return one image per environment, for ``render_mode="rgb_array"``."""
        return list(self.env.render() or [None] * self.num_envs)

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return the attribute of each selected environment, or of the vector environment for each."""
        values = self._attributes(attr_name)
        return [values[i] for i in self._get_indices(indices)]

    def _attributes(self, name: str) -> Sequence[Any]:
        """Return an attribute of all environments."""
        get_attr, is_own = self._vector_method("get_attr"), hasattr(self.env, name)
        if get_attr is not None and (hasattr(self.env, "get_attr") or not is_own):
            try:
                return get_attr(name)
            except RuntimeError:  # ManiSkill's batch of environments refuses
                if not is_own:
                    raise
        return [getattr(self.env, name)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute in each selected environment.

        Raises:
            NotImplementedError: if env has no ``set_attr``, because it steps all environments as one batch.
        """
        selected = set(self._get_indices(indices))
        set_attr = self._vector_method("set_attr")
        if set_attr is None:
            raise NotImplementedError(f"{self.env} has no set_attr: its environments have no attributes")
        has_others = len(selected) < self.num_envs
        values = self.get_attr(attr_name) if has_others else [None] * self.num_envs
        set_attr(attr_name, [value if i in selected else values[i] for i in range(self.num_envs)])

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of each selected environment.

        Raises:
            NotImplementedError: if env has no ``call``, or only some environments are selected that do not
                run in this process, which Gymnasium does not support.
        """
        selected = list(self._get_indices(indices))
        if isinstance(vector := self.env.unwrapped, SyncVectorEnv):
            methods = [vector.envs[i].get_wrapper_attr(method_name) for i in selected]
            return [method(*method_args, **method_kwargs) for method in methods]
        call = self._vector_method("call")
        if call is None:
            raise NotImplementedError(
                f"{self.env} has no call: cannot call {method_name!r} in its environments"
            )
        if len(selected) != self.num_envs:
            raise NotImplementedError(
                f"a VectorEnv calls {method_name!r} in all environments, not only in {indices!r}: pass "
                f"indices=None"
            )
        return list(call(method_name, *method_args, **method_kwargs))

    def _vector_method(self, name: str) -> Callable[..., Any] | None:
        """Return a method of the vector environment, which its wrappers may lack; None if it has none."""
        return getattr(self.env, name, None) or getattr(self.env.unwrapped, name, None)

    def env_is_wrapped(
        self, wrapper_class: type[gymnasium.Wrapper], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Return whether each selected environment is wrapped in the class.

        The result is always True for `Monitor`, because this class reports episodes as `Monitor` does, which
        is the purpose of this query in Stable-Baselines3. It is False for other wrappers of environments in
        other processes or in one batch.
        """
        envs = getattr(self.env.unwrapped, "envs", [None] * self.num_envs)
        return [
            issubclass(wrapper_class, Monitor) or (envs[i] is not None and is_wrapped(envs[i], wrapper_class))
            for i in self._get_indices(indices)
        ]

    def _common_options(self) -> dict[str, Any] | None:
        first = self._options[0]
        if any(options != first for options in self._options):
            raise ValueError(f"a VectorEnv needs the same options in every environment, got {self._options}")
        return first or None

    def _finish(self, observations: Any, infos: dict[str, Any], ends: _Mask) -> tuple[Any, Any, Any]:
        """Return the observations of the next step, and the last observations and infos of the episodes."""
        mode = self.env.metadata["autoreset_mode"]
        if mode is AutoresetMode.NEXT_STEP:
            self.filler_next = ends
            return observations, observations, infos
        if mode is AutoresetMode.DISABLED:
            first, first_infos = self.env.reset(options={"reset_mask": ends})
            self._keep_reset_infos(first_infos, ends)
            return first, observations, without_vector_statistics(infos)
        final = last_observations(infos)
        if final is None:
            raise self.missing_last_observations()
        self._keep_reset_infos(infos, ends)
        return observations, final, final_infos(infos)

    def missing_last_observations(self) -> FaultyEnvironmentError:
        """Return the error for an episode that ended with SAME_STEP and without last observations."""
        return FaultyEnvironmentError(
            f"{self.env} has autoreset mode SAME_STEP but no infos['final_obs'] at the end of an episode"
        )

    def _keep_reset_infos(self, infos: dict[str, Any], first: _Mask) -> None:
        """Set ``reset_infos`` of the environments whose observation is the first one of an episode."""
        for i in np.flatnonzero(first).tolist():
            info = info_of(infos, i)
            self.reset_infos[i] = {key: info[key] for key in info.keys() - {*_FINAL_OBS, "final_info"}}

    def _record_ends(
        self, rows: list[dict[str, Any]], ends: _Mask, last: Any, infos: dict[str, Any], truncated: _Mask
    ) -> None:
        seconds = round(time.time() - self._started, 6)
        for i in np.flatnonzero(ends).tolist():
            rows[i].update(last_info(infos, i, self.num_envs))
            rows[i]["terminal_observation"] = numbers_in_space(self.observation_space, row_of(last, i))
            rows[i]["TimeLimit.truncated"] = bool(truncated[i])
            if not is_episode(rows[i].get("episode")):
                rows[i]["episode"] = {"r": float(self._returns[i]), "l": int(self._lengths[i]), "t": seconds}
        self._returns[ends] = 0.0
        self._lengths[ends] = 0

    def _mark(self, rows: list[dict[str, Any]], key: str) -> None:
        for i in np.flatnonzero(self.filler_next).tolist():
            rows[i][key] = True


def last_observations(infos: dict[str, Any]) -> Any:
    """Return the last observations (N, ...) of episodes in infos of SAME_STEP; None if there are none."""
    return next((infos[key] for key in _FINAL_OBS if infos.get(key) is not None), None)


def _check_env(env: VectorEnv) -> None:
    if not isinstance(env, VectorEnv):
        raise TypeError(f"env must be a gymnasium.vector.VectorEnv, got {type(env).__name__}: {env}")
    mode = env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        allowed = ", ".join(str(mode) for mode in AutoresetMode)
        raise ValueError(f"{env} must declare metadata['autoreset_mode'] ({allowed}), got {mode!r}")
    if not getattr(env.unwrapped, "copy", True):
        raise ValueError(f"{env} reuses its observation arrays: create it with copy=True")
    check_playable(env.single_observation_space, env.single_action_space)
    if getattr(env.unwrapped, "shared_memory", False) and any(
        is_text(part) for _, part in leaves(env.single_observation_space, "")
    ):
        warn_user(
            f"the text in the observations of {env} is constant, because Gymnasium does not share it between "
            f"processes: create it with shared_memory=False"
        )
