"""Online fine-tuning in rounds of collection and updates, and its resumable state."""

import math
import os
import warnings
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.utils import safe_mean
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rlxf.agents.common.resume import check_same_settings, check_unfinished, newest_checkpoint_file
from rlxf.agents.decision_transformer.episode_collector import EpisodeCollector, ReplayBuffer
from rlxf.agents.offline.resume import read_matching_run
from rlxf.envs import resume
from rlxf.training import Archive, CheckpointError
from rlxf.training.compat import checkpoint_errors
from rlxf.utils.errors import EpisodeLostError

if TYPE_CHECKING:
    from rlxf.agents.decision_transformer.learner import DecisionTransformer


class OnlineFinetuning:
    """Rounds of environment steps, each followed by updates.

    Args:
        agent: agent with its environments.
        replay: replay buffer that updates sample from.
        options: options of `learn_online` that affect the result. ``round_steps`` is the minimum number of
            environment steps in a round, ``round_updates`` the number of updates. Others are only stored.
        log_interval: number of rounds between log outputs.

    Attributes:
        finished: True if the updates after the last step are done.
    """

    def __init__(
        self,
        agent: "DecisionTransformer",
        replay: ReplayBuffer,
        options: Mapping[str, Any],
        log_interval: int,
    ):
        assert agent.env is not None
        self.agent, self.replay, self.options = agent, replay, dict(options)
        self.steps, self.updates = options["round_steps"], options["round_updates"]
        self.log_interval = log_interval
        self.collector = EpisodeCollector(agent, agent.env)
        self._steps_taken = self._rounds = 0
        self.finished = False

    def state(self) -> dict[str, Any]:
        """Return the progress of the rounds and the episode statistics of the log, as JSON."""
        infos = [
            {name: float(each[name]) for name in ("r", "l", "t")} for each in self.agent.ep_info_buffer or ()
        ]
        return {
            "played": self._steps_taken,
            "rounds": self._rounds,
            "added": self.replay.added,
            "episodes": infos,
            "successes": [float(each) for each in self.agent.ep_success_buffer or ()],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._steps_taken, self._rounds = state["played"], state["rounds"]
        size = self.agent._stats_window_size
        self.agent.ep_info_buffer = deque(state["episodes"], maxlen=size)
        self.agent.ep_success_buffer = deque(state["successes"], maxlen=size)

    def play(self) -> None:
        """Step every environment once and add the completed episodes to the replay buffer."""
        episodes, dones, infos = self.collector.step()
        self.replay.extend(episodes)
        self.agent._update_info_buffer(infos, dones)
        self.agent.num_timesteps += len(dones)
        self._steps_taken += len(dones)

    def update_if_due(self) -> None:
        """Run the updates of a round if its environment steps are complete."""
        if self._steps_taken >= self.steps:
            self._steps_taken -= self.steps
            self._learn(self.updates)

    def update_remainder(self) -> None:
        """Run the updates of an incomplete last round, in proportion to its environment steps."""
        self.finished = True
        if self._steps_taken:
            self._learn(math.ceil(self.updates * self._steps_taken / self.steps))

    def _learn(self, updates: int) -> None:
        self._rounds += 1
        windows = self.agent.windows(self.replay.trajectories())
        rate = self.agent.lr_schedule(self.agent.progress_remaining)
        for _ in range(updates):
            self.agent.train(windows, rate)
        if self._rounds % self.log_interval == 0:
            self._log()

    def _log(self) -> None:
        infos = self.agent.ep_info_buffer or ()
        if infos:
            returns, lengths = zip(*((info["r"], info["l"]) for info in infos), strict=True)
            self.agent.logger.record("rollout/ep_rew_mean", safe_mean(np.array(returns)))
            self.agent.logger.record("rollout/ep_len_mean", safe_mean(np.array(lengths)))
        self.agent.dump_logs()


ONLINE = "online"
"""Name of the JSON document in a checkpoint."""
WRAPPERS, EPISODES, COLLECTOR, REPLAY = "wrappers", "episodes", "collector", "replay"
"""Names of the groups of tensors in a checkpoint."""
LOST = "lost"


def online_state(rounds: "OnlineFinetuning") -> Archive:
    """Return the state, in addition to the agent, that `learn_online` needs to continue."""
    env = rounds.collector.env
    document: dict[str, Any] = {"options": rounds.options, "finished": rounds.finished}
    document["rounds"] = rounds.state()
    actions: Mapping[str, NDArray[Any]] = {}
    try:
        document["environment"], actions = resume.episode_state(env)
    except EpisodeLostError as error:
        document["environment"] = {LOST: str(error)}
    groups = {
        WRAPPERS: resume.wrapper_state(env),
        EPISODES: actions,
        COLLECTOR: rounds.collector.arrays(),
        REPLAY: rounds.replay.arrays(),
    }
    tensors = {name: _tensors(group) for name, group in groups.items() if group}
    return Archive({ONLINE: document}, tensors)


def read_online_run(
    agent: "DecisionTransformer", path: str | os.PathLike[str], steps: int, options: dict[str, Any]
) -> Archive:
    """Read a checkpoint that `learn_online` wrote for an agent with the same settings and data.

    Args:
        agent: agent with its dataset.
        path: path of the file, or of a folder of `CheckpointWriter`.
        steps: requested total number of steps, including those in the file.
        options: options of `learn_online` that affect the result.

    Raises:
        FileNotFoundError: if there is no file.
        CheckpointError: if it is damaged, of another format, or was not written during `learn_online`.
        ResumeError: if settings, data or options differ, or the run has reached ``steps`` already.
    """
    file = newest_checkpoint_file(path)
    archive = read_matching_run(agent, file)
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


def load_online_state(rounds: "OnlineFinetuning", archive: Archive) -> None:
    """Restore replay buffer, rounds and environments from a checkpoint.

    If the current episodes cannot be continued, a warning gives the reason and the environments are reset.

    Raises:
        CheckpointError: if the checkpoint does not match the run.
        ValueError: if the environment has other wrappers.
    """
    document, groups = archive.documents[ONLINE], archive.tensors
    env, collector = rounds.collector.env, rounds.collector
    with checkpoint_errors():
        rounds.load_state(document["rounds"])
        rounds.replay.load_arrays(_arrays(groups.get(REPLAY, {})), document["rounds"]["added"])
        collector.load_arrays(_arrays(groups[COLLECTOR]), rounds.agent.device)
    resume.load_wrapper_state(env, _arrays(groups.get(WRAPPERS, {})))
    lost = _why_lost(env, document["environment"], _arrays(groups.get(EPISODES, {})))
    if lost is not None:
        warnings.warn(
            f"the environments are reset, so results will not be bitwise equal to those of the uninterrupted "
            f"run: {lost}",
            stacklevel=3,
        )
        collector.reset()
        _reseed(env, rounds.agent)


def _why_lost(env: VecEnv, document: Mapping[str, Any], actions: Mapping[str, NDArray[Any]]) -> str | None:
    """Continue the current episodes, or return the reason why that is impossible."""
    if LOST in document:
        return str(document[LOST])
    try:
        resume.resume_episodes(env, document, actions)
    except EpisodeLostError as error:
        return str(error)
    return None


def _reseed(env: VecEnv, agent: "DecisionTransformer") -> None:
    """Seed the environments such that new episodes differ from those already collected."""
    if agent.seed is not None:
        seeds = np.random.SeedSequence([agent.seed, agent.num_timesteps])
        env.seed(int(seeds.generate_state(1)[0]))


def _tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(array, order="C")) for name, array in arrays.items()}


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}
