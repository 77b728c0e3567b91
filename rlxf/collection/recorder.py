"""Writing down what happens in environments, episode by episode."""

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
    """Keeps every step of environments side by side; changes nothing.

    It records what passes through. So it stands below all that changes observations and rewards for the
    agent, such as ``VecNormalize``. Filler rows (`GymnasiumVecEnv`) are left out.

    Raises:
        FaultyEnvironmentError: from ``step``, if an environment fails, or an observation or a reward of an
            episode is NaN or infinite.
    """

    def __init__(self, venv: VecEnv):
        super().__init__(venv)
        self._episodes: list[Episode] = []
        self._finished: list[tuple[int, EpisodeBuffer]] = []

    def take(self) -> list[tuple[int, EpisodeBuffer]]:
        """Episodes that ended since the last call, each with the number of its environment."""
        taken, self._finished = self._finished, []
        return taken

    def reset(self) -> VecEnvObs:
        """Begin an episode in every environment; those that were under way are forgotten."""
        observations = self.venv.reset()
        self._finished = []
        self._episodes = [Episode(row_of(observations, i)) for i in range(self.num_envs)]
        return observations

    def step_async(self, actions: NDArray[Any]) -> None:
        """Keep the actions, (E, ...), and give them on."""
        self._actions = np.array(actions)
        self.venv.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments and write it down."""
        try:
            observations, rewards, dones, infos = self.venv.step_wait()
        except Exception as error:  # each environment has errors of its own
            raise FaultyEnvironmentError(f"an environment failed: {error!r}") from error
        for i, info in enumerate(infos):
            row, played = row_of(observations, i), not info.get("filler", False)
            if played:
                seen = info["terminal_observation"] if dones[i] else row
                self._episodes[i].add(self._actions[i], float(rewards[i]), seen)
            if dones[i] and played:
                cut = bool(info.get("TimeLimit.truncated", False))
                self._finished.append((i, self._episodes[i].ended(truncated=cut)))
            if dones[i] or not played:
                self._episodes[i] = Episode(row)
        return observations, rewards, dones, infos
