"""Gymnasium vector environments under the interface of Stable-Baselines3."""

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from rlxf.envs.errors import EpisodeLostError, FaultyEnvironmentError
from rlxf.envs.infos import info_of, row_of
from rlxf.envs.resumable import Resumable
from rlxf.envs.spaces import check_playable


def as_vec_env(env: VectorEnv) -> VecEnv:
    """``env`` as a Stable-Baselines3 ``VecEnv``; see `GymnasiumVecEnv`."""
    return GymnasiumVecEnv(env)


def has_filler_rows(env: VecEnv) -> bool:
    """Whether a filler row follows the end of each episode (NEXT_STEP); see `GymnasiumVecEnv`."""
    inner = env.unwrapped
    next_step = AutoresetMode.NEXT_STEP
    return isinstance(inner, GymnasiumVecEnv) and inner.env.metadata["autoreset_mode"] is next_step


def shows_filler_rows(env: VecEnv, observation: VecEnvObs) -> bool:
    """Return True if an observation is the last one of the environments and has a filler row.

    Args:
        env: the environments, also inside of wrappers that pass observations on or normalize them.
        observation: of all environments.
    """
    inner = env.unwrapped
    if not isinstance(inner, GymnasiumVecEnv) or not inner.filler_next.any():
        return False
    normalizer, last = unwrap_vec_normalize(env), inner.last_observation
    return _equal(last if normalizer is None else normalizer.normalize_obs(last), observation)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return isinstance(other, dict) and all(_equal(part, other.get(key)) for key, part in one.items())
    return np.array_equal(one, other)


class GymnasiumVecEnv(VecEnv):
    """A Gymnasium 1.x `VectorEnv` behind Stable-Baselines3's `VecEnv`, whatever its autoreset mode.

    On a step that ends the episode of environment i, ``infos[i]`` holds the environment's own info and

    - ``terminal_observation``: the last observation of the episode,
    - ``TimeLimit.truncated``: truncated and not terminated,
    - ``episode``: return ``r``, length ``l`` in steps, seconds ``t`` since the start, as `Monitor` does.

    All other infos are empty dicts of their own: filling them each step would cost more than small
    environments themselves. Rewards are float32 (N,), ends bool (N,).

    The observation that comes with an end depends on ``env.metadata["autoreset_mode"]``:

    - SAME_STEP and DISABLED: the first one of the next episode, as Stable-Baselines3 expects. (DISABLED: this
      object resets the ended environments with ``options={"reset_mask": ends}``.)
    - NEXT_STEP: the last one of the episode, and ``infos[i]["filler_next"]`` is True: the environment's next
      step is a filler. That step ignores its action, pays 0, ends nothing, counts in no
      episode, has ``infos[i]["filler"]`` True and returns the first observation of the next episode. A
      learner must mask the transition that starts from the returned observation.

    Args:
        env: the vector environment. It must return fresh arrays (``copy=True``).

    Attributes:
        last_observation: that of the last `step` or `reset`; None before the first.

    Raises:
        TypeError: if env is not a `VectorEnv` or a space is not supported (`check_playable`).
        ValueError: if env names no autoreset mode, or reuses its observation arrays.
        FaultyEnvironmentError: from `step`, if env resets in the same step without giving ``final_obs``.
    """

    def __init__(self, env: VectorEnv):
        _check_env(env)
        self.env = env
        self._finish = {
            AutoresetMode.SAME_STEP: self._finish_same_step,
            AutoresetMode.NEXT_STEP: self._finish_next_step,
            AutoresetMode.DISABLED: self._finish_disabled,
        }[env.metadata["autoreset_mode"]]
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
        self._started = time.time()
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, dtype=np.int64)
        self._filler = np.zeros(self.num_envs, dtype=np.bool_)
        self.last_observation: Any = None

    @property
    def filler_next(self) -> NDArray[np.bool_]:
        """(N,) bool: environments whose next step is a filler."""
        return self._filler

    def reset(self) -> VecEnvObs:
        """First observations of all environments, with the seed and options set before."""
        observations, infos = self.env.reset(seed=self._seeds[0], options=self._common_options())
        self.reset_infos = [info_of(infos, i) for i in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        self._returns[:], self._lengths[:], self._filler[:] = 0.0, 0, False
        self.last_observation = observations
        return observations

    def state(self) -> dict[str, Any]:
        """What `take_up` needs to go on amid the episodes, as JSON.

        Raises:
            EpisodeLostError: if the vector environment is not `Resumable`.
        """
        return {
            "env": self._resumable.state(),
            "returns": self._returns.tolist(),
            "lengths": self._lengths.tolist(),
            "filler": self._filler.tolist(),
        }

    def take_up(self, state: dict[str, Any]) -> None:
        """Go on behind `state`, without a reset."""
        self._resumable.take_up(state["env"])
        self._returns, self._lengths = np.array(state["returns"]), np.array(state["lengths"])
        self._filler = np.array(state["filler"])

    @property
    def _resumable(self) -> Resumable:
        if not isinstance(self.env, Resumable):
            raise EpisodeLostError(f"{self.env} is not Resumable: it gives out no state")
        return self.env

    def step_async(self, actions: NDArray[Any]) -> None:
        """Keep the actions, (N, ...), for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments; see the class for what comes back."""
        observations, rewards, terminated, truncated, infos = self.env.step(self._actions)
        ends = terminated | truncated
        self._returns += rewards
        self._lengths += ~self._filler
        rows: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        self._mark(rows, "filler")
        self._filler = np.zeros(self.num_envs, dtype=np.bool_)
        if ends.any():
            observations, last, last_infos = self._finish(observations, infos, ends)
            self._report(rows, ends, last, last_infos, truncated & ~terminated)
            self._mark(rows, "filler_next")
        self.last_observation = observations
        return observations, rewards.astype(np.float32), ends, rows

    def close(self) -> None:
        """Close the vector environment."""
        self.env.close()

    def get_images(self) -> list[Any]:
        """One picture per environment, for ``render_mode="rgb_array"``."""
        return list(self.env.render() or [None] * self.num_envs)

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """The attribute of each chosen environment, or the batch's own where it has no separate ones."""
        ask = getattr(self.env, "get_attr", None)
        values = ask(attr_name) if ask else [getattr(self.env, attr_name)] * self.num_envs
        return [values[i] for i in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute in each chosen environment.

        Raises:
            NotImplementedError: if env steps its environments as one batch, so they have no attributes.
        """
        chosen = set(self._get_indices(indices))
        if not hasattr(self.env, "set_attr"):
            raise NotImplementedError(f"{self.env} has no set_attr: its environments have no attributes")
        others = len(chosen) < self.num_envs
        values = self.get_attr(attr_name) if others else [None] * self.num_envs
        self.env.set_attr(attr_name, [value if i in chosen else values[i] for i in range(self.num_envs)])

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of every environment.

        Raises:
            NotImplementedError: if env has no ``call``, or only some environments are chosen, for which
                Gymnasium has no way.
        """
        if not hasattr(self.env, "call"):
            raise NotImplementedError(
                f"{self.env} has no call: cannot call {method_name!r} in its environments"
            )
        if len(list(self._get_indices(indices))) != self.num_envs:
            raise NotImplementedError(
                f"a VectorEnv calls {method_name!r} in all environments, not in {indices!r}"
            )
        return list(self.env.call(method_name, *method_args, **method_kwargs))

    def env_is_wrapped(
        self, wrapper_class: type[gymnasium.Wrapper], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Whether each chosen environment is wrapped.

        Always True for `Monitor`: the episodes are reported here as Monitor does, which is what
        Stable-Baselines3 asks this for. Environments in other processes or in one batch show no wrappers.
        """
        envs = getattr(self.env.unwrapped, "envs", [None] * self.num_envs)
        return [
            issubclass(wrapper_class, Monitor) or (envs[i] is not None and is_wrapped(envs[i], wrapper_class))
            for i in self._get_indices(indices)
        ]

    def _common_options(self) -> dict[str, Any] | None:
        first = self._options[0]
        if any(options != first for options in self._options):
            raise ValueError(f"a VectorEnv takes the same options in every environment, got {self._options}")
        return first or None

    def _finish_same_step(self, observations: Any, infos: dict[str, Any], ends: NDArray[np.bool_]) -> Any:
        if "final_obs" not in infos:
            raise FaultyEnvironmentError(
                f"{self.env} resets in the same step but gave no infos['final_obs'] at an end"
            )
        return observations, infos["final_obs"], infos.get("final_info", {})

    def _finish_next_step(self, observations: Any, infos: dict[str, Any], ends: NDArray[np.bool_]) -> Any:
        self._filler = ends
        return observations, observations, infos

    def _finish_disabled(self, observations: Any, infos: dict[str, Any], ends: NDArray[np.bool_]) -> Any:
        first, _ = self.env.reset(options={"reset_mask": ends})
        return first, observations, infos

    def _report(
        self,
        rows: list[dict[str, Any]],
        ends: NDArray[np.bool_],
        last: Any,
        infos: dict[str, Any],
        cut: NDArray[np.bool_],
    ) -> None:
        seconds = round(time.time() - self._started, 6)
        for i in np.flatnonzero(ends).tolist():
            rows[i].update(info_of(infos, i))
            rows[i]["terminal_observation"] = row_of(last, i)
            rows[i]["TimeLimit.truncated"] = bool(cut[i])
            rows[i]["episode"] = {"r": float(self._returns[i]), "l": int(self._lengths[i]), "t": seconds}
        self._returns[ends] = 0.0
        self._lengths[ends] = 0

    def _mark(self, rows: list[dict[str, Any]], key: str) -> None:
        for i in np.flatnonzero(self._filler).tolist():
            rows[i][key] = True


def _check_env(env: VectorEnv) -> None:
    if not isinstance(env, VectorEnv):
        raise TypeError(f"env must be a gymnasium.vector.VectorEnv, got {type(env).__name__}: {env}")
    mode = env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        known = ", ".join(str(mode) for mode in AutoresetMode)
        raise ValueError(f"{env} must name its autoreset_mode in its metadata ({known}), got {mode!r}")
    if not getattr(env.unwrapped, "copy", True):
        raise ValueError(f"{env} reuses its observation arrays: make it with copy=True")
    check_playable(env.single_observation_space, env.single_action_space)
