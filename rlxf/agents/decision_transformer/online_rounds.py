"""Rounds of environment steps and updates in online fine-tuning, and their state in a checkpoint."""

import math
import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.common.checkpoint import check_same_settings, check_unfinished, newest_checkpoint_file
from rlxf.agents.decision_transformer.episode_collector import EpisodeCollector, ReplayBuffer
from rlxf.agents.offline.checkpoint import read_matching_run
from rlxf.envs import resume
from rlxf.training import Archive, CheckpointError
from rlxf.training.compat import checkpoint_errors
from rlxf.training.serialization import arrays_to_tensors, tensors_to_arrays
from rlxf.utils.errors import EpisodeLostError

ONLINE = "online"
"""Name of the JSON document in a checkpoint."""
WRAPPERS, EPISODES, COLLECTOR, REPLAY = "wrappers", "episodes", "collector", "replay"
"""Names of the groups of tensors in a checkpoint."""
LOST = "lost"


class OnlineRounds:
    """Rounds of environment steps, each followed by updates.

    Args:
        collector: collector of episodes with its environments.
        replay: replay buffer that updates sample from.
        options: options of `learn_online` that affect the result. ``round_steps`` is the minimum number of
            environment steps in a round, ``round_updates`` the number of updates. Others are only stored.

    Attributes:
        completed: number of rounds whose updates are due or done.
        finished: True if the updates after the last step are due or done.
    """

    def __init__(self, collector: EpisodeCollector, replay: ReplayBuffer, options: Mapping[str, Any]):
        self.collector, self.replay, self.options = collector, replay, dict(options)
        self.steps, self.updates = options["round_steps"], options["round_updates"]
        self.completed = self._steps_taken = 0
        self.finished = False

    def collect(self) -> tuple[NDArray[np.bool_], list[dict[str, Any]]]:
        """Step every environment once and add completed episodes to the replay; return dones and infos."""
        episodes, dones, infos = self.collector.step()
        self.replay.extend(episodes)
        self._steps_taken += len(dones)
        return dones, infos

    def due_updates(self) -> int:
        """Return the number of updates if the steps of a round are complete, and begin the next; else 0."""
        if self._steps_taken < self.steps:
            return 0
        self._steps_taken -= self.steps
        self.completed += 1
        return self.updates

    def remaining_updates(self) -> int:
        """Return the number of updates for an incomplete last round, in proportion to its steps."""
        self.finished = True
        self.completed += self._steps_taken > 0
        return math.ceil(self.updates * self._steps_taken / self.steps)

    def state(self, episode_statistics: Mapping[str, Any]) -> Archive:
        """Return the state, in addition to the agent, that `learn_online` needs to continue.

        ``episode_statistics`` are JSON data of the agent's log, which are stored next to the progress.
        """
        env = self.collector.env
        progress = {"played": self._steps_taken, "rounds": self.completed, "added": self.replay.added}
        document: dict[str, Any] = {"options": self.options, "finished": self.finished}
        document["rounds"] = progress | dict(episode_statistics)
        actions: Mapping[str, NDArray[Any]] = {}
        try:
            document["environment"], actions = resume.episode_state(env)
        except EpisodeLostError as error:
            document["environment"] = {LOST: str(error)}
        groups = {
            WRAPPERS: resume.wrapper_state(env),
            EPISODES: actions,
            COLLECTOR: self.collector.arrays(),
            REPLAY: self.replay.arrays(),
        }
        tensors = {name: arrays_to_tensors(group) for name, group in groups.items() if group}
        return Archive({ONLINE: document}, tensors)

    def load_state(self, archive: Archive, device: torch.device, seed: int | None) -> None:
        """Restore replay buffer, progress and environments from a checkpoint.

        If the current episodes cannot be continued, a warning gives the reason and the environments are
        reset.

        Args:
            archive: content of the file.
            device: device of the model.
            seed: seed of the environments if they are reset; None to leave their generators unchanged.

        Raises:
            CheckpointError: if the checkpoint does not match the run.
            ValueError: if the environment has other wrappers.
        """
        document, groups, env = archive.documents[ONLINE], archive.tensors, self.collector.env
        with checkpoint_errors():
            self._steps_taken, self.completed = (document["rounds"][name] for name in ("played", "rounds"))
            self.replay.load_arrays(tensors_to_arrays(groups.get(REPLAY, {})), document["rounds"]["added"])
            self.collector.load_arrays(tensors_to_arrays(groups[COLLECTOR]), device)
        resume.load_wrapper_state(env, tensors_to_arrays(groups.get(WRAPPERS, {})))
        lost = _why_lost(env, document["environment"], tensors_to_arrays(groups.get(EPISODES, {})))
        if lost is not None:
            warnings.warn(
                f"the environments are reset, so results will not be bitwise equal to those of the "
                f"uninterrupted run: {lost}",
                stacklevel=3,
            )
            self.collector.reset()
            if seed is not None:
                env.seed(seed)


def read_online_run(
    path: str | os.PathLike[str], description: Any, steps: int, options: dict[str, Any]
) -> Archive:
    """Read a checkpoint that `learn_online` wrote for an agent with the same settings and data.

    Args:
        path: path of the file, or of a folder of `CheckpointWriter`.
        description: result of `rlxf.agents.offline.checkpoint.describe` for the agent with its dataset.
        steps: requested total number of steps, including those in the file.
        options: options of `learn_online` that affect the result.

    Raises:
        FileNotFoundError: if there is no file.
        CheckpointError: if it is damaged, of another format, or was not written during `learn_online`.
        ResumeError: if settings, data or options differ, or the run has reached ``steps`` already.
    """
    file = newest_checkpoint_file(path)
    archive = read_matching_run(file, description)
    if ONLINE not in archive.documents:
        raise CheckpointError(
            f"{file} was not written during learn_online: load it, and call learn_online without resume_from"
        )
    with checkpoint_errors():
        options_of_run, finished = (archive.documents[ONLINE][name] for name in ("options", "finished"))
        done = archive.documents["agent"]["progress"]["num_timesteps"]
    check_same_settings(options, options_of_run, file)
    if finished:  # else updates may be left after the last step
        check_unfinished(done, steps, "steps", file)
    return archive


def _why_lost(env: VecEnv, document: Mapping[str, Any], actions: Mapping[str, NDArray[Any]]) -> str | None:
    """Continue the current episodes, or return the reason why that is impossible."""
    if LOST in document:
        return str(document[LOST])
    try:
        resume.resume_episodes(env, document, actions)
    except EpisodeLostError as error:
        return str(error)
    return None
