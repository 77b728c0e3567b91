"""Online data of a Decision Transformer: episode collection, and rounds of updates."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.common.checkpoint import check_same_settings, check_unfinished, newest_checkpoint_file
from rlxf.agents.common.environment_checks import (
    check_observations,
    check_step_results,
    restore_stats_on_error,
)
from rlxf.agents.decision_transformer.acting import DecisionTransformerActing
from rlxf.agents.decision_transformer.replay_buffer import ReplayBuffer, Transitions
from rlxf.agents.offline.checkpoint import read_matching_run
from rlxf.envs import resume
from rlxf.envs.infos import is_filler
from rlxf.envs.return_to_go import encoded_observation_space, is_return_conditioned
from rlxf.envs.spaces import nested_parts, observation_from_nested_parts
from rlxf.envs.step_checks import with_checked_steps
from rlxf.envs.wrapper_state import load_wrapper_state, wrapper_state
from rlxf.training import Archive, CheckpointError
from rlxf.training.compat import checkpoint_errors
from rlxf.training.serialization import arrays_to_tensors, tensors_to_arrays
from rlxf.utils.warnings import warn_user


class EpisodeCollector:
    """Collector of episodes: step E environments with exploration and return each episode as it ends.

    Args:
        agent: agent that chooses the actions.
        env: environments, wrapped in `ReturnToGo` if the agent acts for a target return; they are reset
            before the first step.
        noise: standard deviation of the exploration noise of deterministic policies (`Head.explore`).

    Raises:
        FaultyEnvironmentError: also from `step`, if an observation or a reward is NaN or infinite. The
            current episodes are lost.
    """

    def __init__(self, agent: DecisionTransformerActing, env: VecEnv, noise: float = 0.0):
        self.agent = agent
        self.env = with_checked_steps(env)
        self.noise = noise
        self._conditioned = is_return_conditioned(env.observation_space)
        space: Any = env.observation_space
        self._space = space["observation"] if self._conditioned else encoded_observation_space(space)
        self._is_array = self._space is space
        self._step_count = 0
        self.reset()

    def reset(self) -> None:
        """Discard the current episodes; the next `step` resets the environments."""
        self._last_obs: Any = None
        self._state: Any = None
        self._starts = np.ones(self.env.num_envs, np.bool_)
        self._steps: list[Transitions] = []
        self._episode_offset = np.zeros(self.env.num_envs, np.int64)

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return the state for continuing the current episodes."""
        arrays = {"starts": self._starts, "first": self._episode_offset, "taken": np.array(self._step_count)}
        if self._last_obs is not None:
            arrays |= nested_parts(self.env.observation_space, self._last_obs, "seen")
        if self._state is not None:
            tensors = self.agent.policy.state_tensors(self._state)
            arrays |= {f"state.{name}": part.cpu().numpy() for name, part in tensors.items()}
        if self._steps:
            steps = Transitions(*map(np.stack, zip(*self._steps, strict=True)))
            arrays |= {f"steps.{name}": part for name, part in steps._asdict().items()}
        return arrays

    def load_state_dict(self, arrays: Mapping[str, NDArray[Any]], device: torch.device) -> None:
        """Continue from the result of `state_dict`."""
        self._starts = arrays["starts"]
        self._episode_offset = arrays["first"]
        self._step_count = int(arrays["taken"])
        self._last_obs = None
        if any(name.startswith("seen") for name in arrays):
            self._last_obs = observation_from_nested_parts(self.env.observation_space, arrays, "seen")
        state, steps = _with_prefix("state.", arrays), _with_prefix("steps.", arrays)
        tensors = {name: torch.from_numpy(part).to(device) for name, part in state.items()}
        self._state = self.agent.policy.state_from_tensors(tensors) if tensors else None
        columns = zip(*Transitions(**steps), strict=True) if steps else ()
        self._steps = [Transitions(*step) for step in columns]

    def step(self) -> tuple[list[Transitions], NDArray[np.bool_], list[dict[str, Any]]]:
        """Step every environment; return the completed episodes, the dones (E,) and the infos."""
        if self._last_obs is None:
            self._reset()
        actions, self._state = self.agent.explore(self._last_obs, self._state, self._starts, noise=self.noise)
        observations, encoded_actions = self.agent.encode(self._last_obs, actions)
        self._step_count += 1
        with restore_stats_on_error(self.env):
            self._last_obs, rewards, dones, infos = self.env.step(actions)
            obs = self._observed(self._last_obs)
            count = self._step_count
            check_step_results(self.env, obs, rewards, dones, count, space=self._space)
        terminated = dones & ~is_truncated(infos)
        self._steps.append(
            Transitions(observations, encoded_actions, np.asarray(rewards, np.float32), terminated)
        )
        fillers = is_filler(infos)
        episodes = [self._episode(row) for row in np.flatnonzero(dones & ~fillers).tolist()]
        self._starts = dones | fillers
        self._episode_offset[self._starts] = len(self._steps)
        unused = int(self._episode_offset.min())  # steps that belong to no current episode
        del self._steps[:unused]
        self._episode_offset -= unused
        return episodes, dones, infos

    def _reset(self) -> None:
        with restore_stats_on_error(self.env):
            obs: Any = self.env.reset()
            first = self._observed(obs)
            count = self._step_count
            check_observations("first observation", self.env, first, count, space=self._space)
        self._last_obs = obs

    def _observed(self, observation: Any) -> Any:
        """Return the observations of the environments as an array; a Dict or a Tuple is flattened."""
        if self._conditioned:
            return observation["observation"]
        return observation if self._is_array else self.agent.encode_observation(observation)

    def _episode(self, row: int) -> Transitions:
        steps = self._steps[self._episode_offset[row] :]
        return Transitions(*(np.stack([part[row] for part in parts]) for parts in zip(*steps, strict=True)))


def is_truncated(infos: Sequence[dict[str, Any]]) -> NDArray[np.bool_]:
    """Return the mask of the environments whose episode is truncated and not terminated, bool (E,)."""
    return np.array([info.get("TimeLimit.truncated", False) for info in infos], np.bool_)


def _with_prefix(start: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays whose names begin with a prefix; the prefix is removed from the keys."""
    return {name.removeprefix(start): part for name, part in arrays.items() if name.startswith(start)}


ONLINE = "online"
"""Name of the JSON document in a checkpoint."""
WRAPPERS = "wrappers"
EPISODES = "episodes"
COLLECTOR = "collector"
REPLAY = "replay"
"""Names of the groups of tensors in a checkpoint."""


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
        self.collector = collector
        self.replay = replay
        self.options = dict(options)
        self.steps, self.updates = options["round_steps"], options["round_updates"]
        self.completed = self._steps_taken = 0
        self.finished = False

    def collect(self) -> tuple[NDArray[np.bool_], list[dict[str, Any]]]:
        """Step every environment once and add completed episodes to the replay; return dones and infos."""
        episodes, dones, infos = self.collector.step()
        self.replay.extend(episodes)
        self._steps_taken += len(dones)
        return dones, infos

    def pop_due_updates(self) -> int:
        """Begin the next round if the steps of this one are complete; return the number of due updates.

        It is 0 while the steps are incomplete. A step of many environments may complete several rounds.
        """
        rounds, self._steps_taken = divmod(self._steps_taken, self.steps)
        self.completed += rounds
        return rounds * self.updates

    def finish(self) -> int:
        """End the last round, which may be incomplete; return its updates, in proportion to its steps."""
        self.finished = True
        steps, self._steps_taken = self._steps_taken, 0
        self.completed += steps > 0
        return math.ceil(self.updates * steps / self.steps)

    def to_archive(self, episode_statistics: Mapping[str, Any]) -> Archive:
        """Return the state, in addition to the agent, that `learn_online` needs to continue.

        ``episode_statistics`` are JSON data of the agent's log, which are stored in addition to the progress.
        """
        env = self.collector.env
        progress = {"played": self._steps_taken, "rounds": self.completed}
        rounds = progress | dict(episode_statistics)
        document: dict[str, Any] = {"options": self.options, "finished": self.finished, "rounds": rounds}
        document["environment"], actions = resume.episode_state_or_reason(env)
        groups = {
            WRAPPERS: wrapper_state(env),
            EPISODES: actions,
            COLLECTOR: self.collector.state_dict(),
            REPLAY: self.replay.state_dict(),
        }
        tensors = {name: arrays_to_tensors(group) for name, group in groups.items() if group}
        return Archive({ONLINE: document}, tensors)

    def load_archive(self, archive: Archive, device: torch.device, seed: int | None) -> None:
        """Restore replay buffer, progress and environments from a checkpoint.

        If the current episodes cannot be continued, a warning gives the reason and the environments are
        reset.

        Args:
            archive: content of the file.
            device: device of the model.
            seed: seed of the environments if they are reset; None to leave their generators unchanged.

        Raises:
            CheckpointError: if the checkpoint does not match the run.
            ValueError: if the environment has different wrappers.
        """
        document = archive.documents[ONLINE]
        groups = archive.tensors
        env = self.collector.env
        with checkpoint_errors():
            self._steps_taken, self.completed = (document["rounds"][name] for name in ("played", "rounds"))
            self.replay.load_state_dict(tensors_to_arrays(groups.get(REPLAY, {})))
            self.collector.load_state_dict(tensors_to_arrays(groups[COLLECTOR]), device)
        load_wrapper_state(env, tensors_to_arrays(groups.get(WRAPPERS, {})))
        actions = tensors_to_arrays(groups.get(EPISODES, {}))
        lost = resume.try_resume_episodes(env, document["environment"], actions)
        if lost is not None:
            warn_user(
                f"the environments are reset, so results will not be bitwise equal to those of the "
                f"uninterrupted run: {lost}"
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
        CheckpointError: if it is damaged, of a different format, or was not written during `learn_online`.
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
