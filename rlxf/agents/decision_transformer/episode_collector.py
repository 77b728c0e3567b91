"""Collection of episodes online, and the replay of the best episodes."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.common.numerics import check_initial_observations, check_step_results, restore_stats_on_error
from rlxf.agents.offline.trajectory_model import ContextWindow
from rlxf.data import Trajectories, return_to_go
from rlxf.envs.batches import is_filler
from rlxf.envs.step_checks import with_checked_steps


class Transitions(NamedTuple):
    """Observations, actions and rewards of N steps, encoded as in `Trajectories`.

    They belong to an episode of N steps, or to N environments at one step.

    Args:
        observations: (N, D) or (N, C, H, W).
        actions: (N, ...).
        rewards: (N,).
    """

    observations: NDArray[Any]
    actions: NDArray[Any]
    rewards: NDArray[np.float32]


def concatenate(episodes: Iterable[Transitions]) -> Transitions:
    """Concatenate episodes along the axis of steps."""
    return Transitions(*map(np.concatenate, zip(*episodes, strict=True)))


class ReplayBuffer:
    """Replay buffer of the last N episodes, in memory.

    It initially holds the best episodes of the dataset, of which those with the lowest return are removed
    first.

    Source: Zheng et al. 2022, arXiv:2202.05607, section 4.1, algorithm 1.

    Args:
        data: offline dataset of the agent.
        capacity: number of episodes N, at least 1.
    """

    def __init__(self, data: Trajectories, capacity: int):
        best = np.argsort(data.returns, kind="stable")[-capacity:]
        self.data, self.capacity = data, capacity
        self.episodes = deque((self._of_data(e) for e in best.tolist()), maxlen=capacity)
        self.added = 0

    def extend(self, episodes: Sequence[Transitions]) -> None:
        """Add collected episodes; the oldest episodes beyond the capacity are removed."""
        self.episodes.extend(episodes)
        self.added += len(episodes)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the collected episodes, concatenated; those of the dataset need not be saved."""
        collected = list(self.episodes)[-self.added :] if self.added else []
        if not collected:
            return {}
        lengths = np.array([len(episode.rewards) for episode in collected])
        return concatenate(collected)._asdict() | {"lengths": lengths}

    def load_arrays(self, arrays: Mapping[str, NDArray[Any]], added: int) -> None:
        """Restore the result of `arrays` in a new buffer of the same dataset.

        Args:
            arrays: result of `arrays`.
            added: number of episodes added so far, including those that were removed.
        """
        collected: list[Transitions] = []
        if arrays:
            ends = np.cumsum(arrays["lengths"])[:-1]
            parts = [np.split(arrays[name], ends) for name in Transitions._fields]
            collected = [Transitions(*episode) for episode in zip(*parts, strict=True)]
        too_many = len(self.episodes) + added - self.capacity
        for _ in range(min(len(self.episodes), too_many)):
            self.episodes.popleft()
        self.episodes.extend(collected)
        self.added = added

    def trajectories(self) -> Trajectories:
        """Return all episodes as flat arrays; returns-to-go are those achieved (hindsight relabeling)."""
        rewards = [episode.rewards for episode in self.episodes]
        ends = np.ones(len(rewards), np.bool_)
        return replace(
            self.data,
            **concatenate(self.episodes)._asdict(),
            return_to_go=np.concatenate([return_to_go(each) for each in rewards]).astype(np.float32),
            offsets=np.cumsum([0, *map(len, rewards)]),
            terminated=ends,
            truncated=~ends,
        )

    def _of_data(self, number: int) -> Transitions:
        steps = slice(*self.data.offsets[number : number + 2].tolist())
        return Transitions(self.data.observations[steps], self.data.actions[steps], self.data.rewards[steps])


class CollectingPolicy(Protocol):
    """Agent that chooses actions and encodes observations."""

    def predict(
        self, observation: Any, state: Any, episode_start: Any, deterministic: bool
    ) -> tuple[NDArray[Any], Any]:
        """Choose actions."""

    def encode(self, observation: Any, actions: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Encode observations and actions as in the dataset."""


class EpisodeCollector:
    """Collector of episodes: step E environments with sampled actions and return each episode as it ends.

    Args:
        policy: agent that chooses the actions.
        env: environments wrapped in `ReturnToGo`; they are reset before the first step.

    Raises:
        FaultyEnvironmentError: also from `step`, if an observation or a reward is NaN or infinite. The
            current episodes are lost.
    """

    def __init__(self, policy: CollectingPolicy, env: VecEnv):
        self.policy, self.env = policy, with_checked_steps(env)
        assert isinstance(env.observation_space, spaces.Dict)  # of a `ReturnToGo`
        self._space = env.observation_space["observation"]
        self._step_count = 0
        self.reset()

    def reset(self) -> None:
        """Discard the current episodes; the next `step` resets the environments."""
        self._last_obs: Any = None
        self._state: ContextWindow | None = None
        self._starts = np.ones(self.env.num_envs, np.bool_)
        self._steps: list[Transitions] = []
        self._first = np.zeros(self.env.num_envs, np.int64)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state for continuing the current episodes."""
        own = {"starts": self._starts, "first": self._first, "taken": np.array(self._step_count)}
        if self._last_obs is not None:
            own |= {f"seen.{name}": np.asarray(part) for name, part in self._last_obs.items()}
        if self._state is not None:
            own |= {f"state.{name}": part.cpu().numpy() for name, part in vars(self._state).items()}
        if self._steps:
            parts = zip(Transitions._fields, zip(*self._steps, strict=True), strict=True)
            own |= {f"steps.{name}": np.stack(each) for name, each in parts}
        return own

    def load_arrays(self, arrays: Mapping[str, NDArray[Any]], device: torch.device) -> None:
        """Continue from the result of `arrays`."""
        self._starts, self._first, self._step_count = arrays["starts"], arrays["first"], int(arrays["taken"])
        self._last_obs = _with_prefix("seen.", arrays) or None
        state = {
            name: torch.from_numpy(part).to(device) for name, part in _with_prefix("state.", arrays).items()
        }
        self._state = ContextWindow(**state) if state else None
        steps = [arrays[f"steps.{name}"] for name in Transitions._fields if f"steps.{name}" in arrays]
        self._steps = [Transitions(*step) for step in zip(*steps, strict=True)]

    def step(self) -> tuple[list[Transitions], NDArray[np.bool_], list[dict[str, Any]]]:
        """Step every environment; return the completed episodes, the dones (E,) and the infos."""
        if self._last_obs is None:
            self._reset()
        actions, self._state = self.policy.predict(
            self._last_obs, self._state, self._starts, deterministic=False
        )
        observations, encoded_actions = self.policy.encode(self._last_obs, actions)
        self._step_count += 1
        with restore_stats_on_error(self.env):
            self._last_obs, rewards, dones, infos = self.env.step(actions)
            check_step_results(
                self.env,
                self._last_obs["observation"],
                rewards,
                self._step_count,
                space=self._space,
                dones=dones,
            )
        self._steps.append(Transitions(observations, encoded_actions, np.asarray(rewards, np.float32)))
        fillers = is_filler(infos)
        episodes = [self._episode(row) for row in np.flatnonzero(dones & ~fillers).tolist()]
        self._starts = dones | fillers
        self._first[self._starts] = len(self._steps)
        self._drop_ended()
        return episodes, dones, infos

    def _reset(self) -> None:
        with restore_stats_on_error(self.env):
            obs: Any = self.env.reset()
            check_initial_observations(self.env, obs["observation"], self._step_count, space=self._space)
        self._last_obs = obs

    def _episode(self, row: int) -> Transitions:
        steps = self._steps[self._first[row] :]
        return Transitions(*(np.stack([part[row] for part in parts]) for parts in zip(*steps, strict=True)))

    def _drop_ended(self) -> None:
        """Drop the steps that belong to no current episode."""
        count = int(self._first.min())
        del self._steps[:count]
        self._first -= count


def _with_prefix(start: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays whose names begin with a prefix; the prefix is removed from the keys."""
    return {name.removeprefix(start): part for name, part in arrays.items() if name.startswith(start)}
