"""Recording of episodes of vector environments into a Minari dataset."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import minari
import numpy as np
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, unwrap_vec_normalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from rlxf.collection.behavior_policy import (
    Agent,
    BehaviorPolicy,
    build_metadata,
    measure_reference_scores,
    plan_policies,
    recreatable_spec,
)
from rlxf.collection.storage import check_new, first_non_finite, stack, storage_space, write_dataset
from rlxf.data import ReferenceScores
from rlxf.data.spaces import tolerant_bounds
from rlxf.envs.infos import is_filler
from rlxf.envs.make import EnvLike, as_vectorized
from rlxf.envs.return_to_go import ReturnToGo, is_return_conditioned
from rlxf.envs.sb3_vec_env import resume_envs_at_exit
from rlxf.envs.spaces import row_of
from rlxf.envs.step_checks import range_fault
from rlxf.evaluation.environment import (
    borrowed_env,
    warn_of_missing_statistics,
    with_training_normalization,
)
from rlxf.evaluation.episodes import check_target_is_given
from rlxf.evaluation.rollout import play, quotas
from rlxf.evaluation.seeding import seeded_sampling
from rlxf.utils.checks import MAX_INT64, check_int
from rlxf.utils.errors import FaultyEnvironmentError
from rlxf.utils.tables import counting_bar


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

    def finish(self, truncated: bool) -> EpisodeBuffer:
        """Return the complete episode of T steps and T + 1 observations.

        Args:
            truncated: mark the last step as truncated instead of terminated.

        Raises:
            FaultyEnvironmentError: if an observation or a reward is NaN or infinite.
        """
        observations, rewards = stack(self._observations), np.array(self._rewards, np.float32)
        for name, rows in (("observation", observations), ("reward", rewards)):
            row = first_non_finite(rows)
            if row is not None:
                raise FaultyEnvironmentError(f"the {name} of step {row} of an episode is NaN or infinite")
        is_last = np.arange(len(rewards)) == len(rewards) - 1
        return EpisodeBuffer(
            observations=observations,
            actions=np.stack(self._actions),
            rewards=rewards,
            terminations=is_last & (not truncated),
            truncations=is_last & truncated,
        )


class CheckedActions(VecEnvWrapper):
    """Wrapper that checks that actions are in their space, as those of a dataset must be.

    Raises:
        ValueError: from ``step``, if an action is outside of the space, except for rounding.
    """

    def __init__(self, venv: VecEnv):
        super().__init__(venv)
        space = venv.action_space
        self._bounds = tolerant_bounds(space) if isinstance(space, spaces.Box) else None

    def reset(self) -> VecEnvObs:
        """Reset the environments."""
        return self.venv.reset()

    def step_async(self, actions: NDArray[Any]) -> None:
        """Check actions (E, ...), and pass them on."""
        fault = self._fault(np.asarray(actions))
        if fault is not None:
            raise ValueError(
                f"an action {fault}. Datasets contain only actions of the action space: clip them in "
                f"predict, or use an environment with a wider action space"
            )
        self.venv.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Step the environments."""
        return self.venv.step_wait()

    def _fault(self, actions: NDArray[Any]) -> str | None:
        if self._bounds is None:
            return range_fault(self.action_space, actions)
        low, high = self._bounds
        outside = ~((actions >= low) & (actions <= high))  # also NaN
        row = np.flatnonzero(outside.reshape(len(actions), -1).any(axis=1))
        return f"is {actions[row[0]].tolist()}, outside of {self.action_space}" if len(row) else None


class Recorder(VecEnvWrapper):
    """Wrapper that records every step of parallel environments without changing it.

    It must be inside all wrappers that change observations and rewards for the agent, such as
    ``VecNormalize``, in order to record raw values. Reset steps (`GymnasiumVecEnv`) are left out.

    Args:
        venv: the environments.

    Attributes:
        recording: mask (E,) of the environments whose steps are recorded, by default all. An environment
            that is left out can be recorded again after `reset` only.

    Raises:
        FaultyEnvironmentError: from ``step``, if an environment raises, or an observation or a reward of an
            episode is NaN or infinite.
    """

    def __init__(self, venv: VecEnv):
        super().__init__(venv)
        self.recording = np.ones(venv.num_envs, dtype=bool)
        self._episodes: list[EpisodeRecord] = []
        self._finished: list[tuple[int, EpisodeBuffer]] = []

    def pop_finished(self) -> list[tuple[int, EpisodeBuffer]]:
        """Return the episodes that ended since the last call, each with the index of its environment."""
        finished, self._finished = self._finished, []
        return finished

    def reset(self) -> VecEnvObs:
        """Start an episode in every environment; discard running episodes and those not yet returned."""
        observations = self.venv.reset()
        self._finished = []
        self._episodes = [EpisodeRecord(row_of(observations, i)) for i in range(self.num_envs)]
        return observations

    def step_async(self, actions: NDArray[Any]) -> None:
        """Convert actions (E, ...) to the dtype of their space, keep a copy, and pass them on."""
        self._actions = np.array(actions, self.action_space.dtype)
        self.venv.step_async(self._actions.copy())

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments and record the results."""
        try:
            observations, rewards, dones, infos = self.venv.step_wait()
        except FaultyEnvironmentError:
            raise
        except Exception as error:  # environments may raise any exception
            raise FaultyEnvironmentError(f"an environment failed: {error!r}") from error
        fillers = is_filler(infos)
        for i in np.flatnonzero(self.recording).tolist():
            row, info = row_of(observations, i), infos[i]
            if not fillers[i]:
                next_observation = info["terminal_observation"] if dones[i] else row
                self._episodes[i].add(self._actions[i], float(rewards[i]), next_observation)
                if dones[i]:
                    truncated = bool(info.get("TimeLimit.truncated", False))
                    self._finished.append((i, self._episodes[i].finish(truncated=truncated)))
            if dones[i] or fillers[i]:
                self._episodes[i] = EpisodeRecord(row)
        return observations, rewards, dones, infos


def rollout_episodes(
    policy: BehaviorPolicy, env: VecEnv, episodes: int, deterministic: bool, seed: int
) -> Iterator[EpisodeBuffer]:
    """Yield episodes of a policy in the order in which they end, an equal share from each environment.

    Args:
        policy: policy to play.
        env: environments without ``VecNormalize``.
        episodes: number of episodes.
        deterministic: use the most likely action instead of a sample.
        seed: seed of the random actions and of the environments; environment i gets ``seed + i``.
    """
    recorder = Recorder(env)
    agent_env = with_training_normalization(policy.agent, recorder)
    warn_of_missing_statistics(policy.agent, agent_env)
    if policy.target_return is not None:
        agent_env = ReturnToGo(agent_env, policy.target_return)
    env.seed(seed)
    remaining = quotas(episodes, env.num_envs)
    recorder.recording = remaining > 0
    player = policy.make_policy(env.action_space, seed)
    for _ in play(player, agent_env, deterministic, lambda: recorder.recording):
        for i, episode in recorder.pop_finished():
            remaining[i] -= 1
            yield episode
        recorder.recording = remaining > 0
        if not remaining.any():
            return


def _check_numbers(episodes: int, n_envs: int, seed: int) -> None:
    for name, number, least in (("episodes", episodes, 1), ("n_envs", n_envs, 1), ("seed", seed, 0)):
        check_int(name, number, least, most=MAX_INT64)


def _check_raw(env: VecEnv) -> None:
    if unwrap_vec_normalize(env) is not None:
        raise ValueError(
            "env has a VecNormalize, but a dataset stores raw observations and rewards: pass the "
            "environments without VecNormalize. An agent that was trained with VecNormalize still gets "
            "normalized observations"
        )
    if is_return_conditioned(env.observation_space):
        raise ValueError(
            "env has a ReturnToGo, but a dataset stores the observations of the task: pass the environments "
            "without it, and target_returns=[...]"
        )


def collect(
    agent: Agent | Sequence[Agent],
    env: EnvLike,
    dataset_id: str,
    episodes: int = 1000,
    *,
    mix: Sequence[float] = (0.0,),
    target_returns: Sequence[float] | None = None,
    deterministic: bool = False,
    n_envs: int = 32,
    seed: int = 0,
    author: str | None = None,
    algorithm_name: str | None = None,
    reference_scores: ReferenceScores | None = None,
    progress_bar: bool = False,
) -> minari.MinariDataset:
    """Record episodes of agents into a new Minari dataset.

    The function records whole episodes from parallel environments, an equal share from each. It stores the
    final observation of each episode, and whether the episode was terminated or truncated. Floats are stored
    as float32, images losslessly. Episodes are written to a temporary folder, which is renamed at the end; a
    failure leaves no files.

    An agent trained with ``VecNormalize`` gets normalized observations, but the dataset has raw ones.

    Args:
        agent: object with SB3's ``predict``, or None for random actions. Each of several agents, for example
            checkpoints of one run, plays an equal share of the episodes.
        env: a Gymnasium id, an ``Env``, a Gymnasium ``VectorEnv`` or an SB3 ``VecEnv``, without
            ``VecNormalize``.
        dataset_id: new Minari id, ``namespace/name-v0``; stored in Minari's folder (MINARI_DATASETS_PATH).
        episodes: total number of episodes.
        mix: fractions of random actions, from 0 to 1. Each agent plays an equal number of episodes with each
            fraction: (0, 0.5, 1) records the agent, the agent with half of its actions random, and a random
            policy.
        target_returns: target returns for `ReturnToGo`, with an equal number of episodes each; None for
            agents that are not conditioned on a return.
        deterministic: use the most likely action instead of a sample.
        n_envs: number of environments to create if ``env`` is an id.
        seed: seed of environments, random actions and sampled actions.
        author: author of the dataset in its metadata.
        algorithm_name: algorithm name in the metadata; None for the names of the agents' classes.
        reference_scores: returns with normalized scores 0 and 100. None takes those of the first agent's data
            or of the environment in the package's table, else measures the mean returns of a random policy
            and of the first agent over 100 episodes each; none if their 95% intervals overlap.
        progress_bar: show a progress bar.

    Raises:
        FileExistsError: if the dataset exists.
        ValueError: if dataset_id is not a Minari id, a number is out of range, ``env`` has a
            ``VecNormalize`` or a `ReturnToGo`, its spaces differ from those of the training of an agent, or
            an action of an agent is outside of the action space.
        TypeError: if a number is not an int, mix is not a sequence, an agent has no ``predict``, ``env`` is
            not an environment or an id, Minari does not support its observation space, or an agent that is
            conditioned on a return has no target.
        FaultyEnvironmentError: if an environment raises, or returns NaN or infinity.
        OSError: if the disk is full or not writable.

    Warns:
        UserWarning: if no spec that a dataset can store recreates the environment, ``env`` is a different
            version of the environment of an agent's data, or the measured reference scores are not stored.
    """
    _check_numbers(episodes, n_envs, seed)
    seed = int(seed)  # Gymnasium refuses NumPy's integers
    agents: list[Any] = list(agent) if isinstance(agent, list | tuple) else [agent]
    policies = plan_policies(agents, mix, target_returns, episodes)
    counts = quotas(episodes, len(policies)).tolist()
    with as_vectorized(env, min(n_envs, max(counts))) as vec_env:
        check_new(dataset_id)
        _check_raw(vec_env)
        for policy in policies:
            if policy.target_return is None and policy.agent is not None:
                check_target_is_given(policy.agent, vec_env)
        for each in agents:
            if hasattr(each, "check_env"):
                each.check_env(vec_env)
        observation_space = storage_space(vec_env.observation_space)
        checked = CheckedActions(vec_env)
        with seeded_sampling(agents, seed), counting_bar(progress_bar) as progress:
            references = reference_scores or measure_reference_scores(policies[0], checked, seed)
            spec = recreatable_spec(vec_env)
            metadata = build_metadata(policies, counts, spec, references, seed, author, algorithm_name)
            played = chain.from_iterable(
                rollout_episodes(policy, checked, count, deterministic, seed + number * vec_env.num_envs)
                for number, (policy, count) in enumerate(zip(policies, counts, strict=True))
            )
            recorded = progress.track(played, episodes, description="collect")
            with borrowed_env(agents, vec_env), resume_envs_at_exit(vec_env):
                return write_dataset(
                    dataset_id, recorded, observation_space, vec_env.action_space, spec, metadata
                )
