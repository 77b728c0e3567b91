"""Recorder of episodes of vector environments."""

from typing import Any

import numpy as np
from minari.data_collector import EpisodeBuffer
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from rlxf.collection.storage import first_non_finite, stack
from rlxf.envs.batches import row_of
from rlxf.utils.errors import FaultyEnvironmentError


class EpisodeRecord:
    """Buffer of the observations, actions and rewards of a running episode.

    Args:
        observation: first observation.
    """

    def __init__(self, observation: Any):
        self._observations = [observation]
        self._actions: list[NDArray[Any]] = []
        self._rewards: list[float] = []

    def add(self, action: NDArray[Any], reward: float, observation: Any) -> None:
        """Add a step: the action, its reward and the next observation."""
        self._actions.append(action)
        self._rewards.append(reward)
        self._observations.append(observation)

    def ended(self, truncated: bool) -> EpisodeBuffer:
        """Return the complete episode of T steps and T + 1 observations.

        Args:
            truncated: mark the last step as truncated instead of terminated.

        Raises:
            FaultyEnvironmentError: if an observation or a reward is NaN or infinite.
        """
        buffer = EpisodeBuffer(
            observations=stack(self._observations),
            actions=np.stack(self._actions),
            rewards=np.array(self._rewards, np.float32),
            terminations=self._is_last() & (not truncated),
            truncations=self._is_last() & truncated,
        )
        _check(buffer)
        return buffer

    def _is_last(self) -> NDArray[np.bool_]:
        return np.arange(len(self._rewards)) == len(self._rewards) - 1


def _check(episode: EpisodeBuffer) -> None:
    for name, rows in (("observation", episode.observations), ("reward", episode.rewards)):
        row = first_non_finite(rows)
        if row is not None:
            raise FaultyEnvironmentError(f"the {name} of step {row} of an episode is NaN or infinite")


class Recorder(VecEnvWrapper):
    """Wrapper that records every step of parallel environments without changing it.

    It must be inside all wrappers that change observations and rewards for the agent, such as
    ``VecNormalize``, in order to record raw values. Filler rows (`GymnasiumVecEnv`) are left out.

    Raises:
        FaultyEnvironmentError: from ``step``, if an environment raises, or an observation or a reward of an
            episode is NaN or infinite.
    """

    def __init__(self, venv: VecEnv):
        super().__init__(venv)
        self._episodes: list[EpisodeRecord] = []
        self._finished: list[tuple[int, EpisodeBuffer]] = []

    def take(self) -> list[tuple[int, EpisodeBuffer]]:
        """Return the episodes that ended since the last call, each with the index of its environment."""
        finished, self._finished = self._finished, []
        return finished

    def reset(self) -> VecEnvObs:
        """Start an episode in every environment, and discard running episodes."""
        observations = self.venv.reset()
        self._finished = []
        self._episodes = [EpisodeRecord(row_of(observations, i)) for i in range(self.num_envs)]
        return observations

    def step_async(self, actions: NDArray[Any]) -> None:
        """Keep a copy of the actions, (E, ...), and pass them on."""
        self._actions = np.array(actions)
        self.venv.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments and record the results."""
        try:
            observations, rewards, dones, infos = self.venv.step_wait()
        except Exception as error:  # environments may raise any exception
            raise FaultyEnvironmentError(f"an environment failed: {error!r}") from error
        for i, info in enumerate(infos):
            row, is_step = row_of(observations, i), not info.get("filler", False)
            if is_step:
                next_observation = info["terminal_observation"] if dones[i] else row
                self._episodes[i].add(self._actions[i], float(rewards[i]), next_observation)
            if dones[i] and is_step:
                truncated = bool(info.get("TimeLimit.truncated", False))
                self._finished.append((i, self._episodes[i].ended(truncated=truncated)))
            if dones[i] or not is_step:
                self._episodes[i] = EpisodeRecord(row)
        return observations, rewards, dones, infos
