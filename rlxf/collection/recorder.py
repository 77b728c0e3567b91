"""Wrapper that records episodes of parallel environments."""

from typing import Any

import numpy as np
from minari.data_collector import EpisodeBuffer
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from rlxf.collection.episode import Episode
from rlxf.envs.errors import FaultyEnvironmentError
from rlxf.envs.infos import row_of


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
        self._episodes: list[Episode] = []
        self._finished: list[tuple[int, EpisodeBuffer]] = []

    def take(self) -> list[tuple[int, EpisodeBuffer]]:
        """Return the episodes that ended since the last call, each with the index of its environment."""
        finished, self._finished = self._finished, []
        return finished

    def reset(self) -> VecEnvObs:
        """Start an episode in every environment, and discard running episodes."""
        observations = self.venv.reset()
        self._finished = []
        self._episodes = [Episode(row_of(observations, i)) for i in range(self.num_envs)]
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
                self._episodes[i] = Episode(row)
        return observations, rewards, dones, infos
