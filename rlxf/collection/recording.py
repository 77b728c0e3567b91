"""Recording of episodes into a Minari dataset."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import minari
import numpy as np
import torch
from minari.data_collector import EpisodeBuffer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize

from rlxf.collection.behavior_policy import Agent, BehaviorPolicy, plan_policies
from rlxf.collection.metadata import build_metadata, measure_reference_scores, recreatable_spec
from rlxf.collection.recorder import Recorder
from rlxf.collection.storage import check_new, storage_space, write_dataset
from rlxf.data import ReferenceScores
from rlxf.envs.batches import is_filler
from rlxf.envs.wrappers.return_to_go import ReturnToGo
from rlxf.evaluation.environment import (
    EnvLike,
    as_vectorized,
    warn_of_missing_statistics,
    with_training_normalization,
)
from rlxf.evaluation.episode_counter import quotas


def rollout_episodes(
    skill: BehaviorPolicy, env: VecEnv, episodes: int, deterministic: bool, seed: int
) -> Iterator[EpisodeBuffer]:
    """Yield episodes of a policy in the order in which they end, an equal share from each environment.

    Args:
        skill: policy to play.
        env: environments without ``VecNormalize``.
        episodes: number of episodes.
        deterministic: use the most likely action instead of a sample.
        seed: seed of the random actions and of the environments; environment i gets ``seed + i``.
    """
    recorder = Recorder(env)
    agent_env = with_training_normalization(skill.agent, recorder)
    warn_of_missing_statistics(skill.agent, agent_env)
    if skill.target_return is not None:
        agent_env = ReturnToGo(agent_env, skill.target_return)
    player = skill.player(env.action_space, seed)
    env.seed(seed)
    missing = quotas(episodes, env.num_envs)
    obs, state, starts = agent_env.reset(), None, np.ones(env.num_envs, dtype=bool)
    while missing.any():
        actions, state = player.predict(obs, state, starts, deterministic)  # type: ignore[arg-type]
        obs, _, dones, infos = agent_env.step(actions)
        starts = dones | is_filler(infos)
        for i, episode in recorder.take():
            if missing[i]:
                missing[i] -= 1
                yield episode


def record(
    skills: Sequence[BehaviorPolicy],
    env: VecEnv,
    dataset_id: str,
    episodes: int,
    *,
    deterministic: bool,
    seed: int,
    author: str | None = None,
    algorithm_name: str | None = None,
    reference_scores: ReferenceScores | None = None,
    progress_bar: bool = False,
) -> minari.MinariDataset:
    """Record an equal number of episodes of each policy into a new dataset; see `collect`."""
    check_new(dataset_id)
    _check_raw(env)
    observation_space = storage_space(env.observation_space)
    counts = quotas(episodes, len(skills)).tolist()
    with _seeded_sampling(skills, seed), _bar(progress_bar) as progress:
        references = reference_scores or measure_reference_scores(skills[0], env, seed)
        spec = recreatable_spec(env)
        metadata = build_metadata(skills, counts, spec, references, seed, author, algorithm_name)
        recorded = _episodes(skills, counts, env, deterministic, seed)
        return write_dataset(
            dataset_id,
            progress.track(recorded, total=episodes, description="collect"),
            observation_space,
            env.action_space,
            spec,
            metadata,
        )


def _episodes(
    skills: Sequence[BehaviorPolicy], counts: Sequence[int], env: VecEnv, deterministic: bool, seed: int
) -> Iterator[EpisodeBuffer]:
    """Yield the episodes of one policy after the other, with different environment seeds for each policy."""
    for number, (skill, count) in enumerate(zip(skills, counts, strict=True)):
        yield from rollout_episodes(skill, env, count, deterministic, seed + number * env.num_envs)


@contextmanager
def _seeded_sampling(skills: Sequence[BehaviorPolicy], seed: int) -> Iterator[None]:
    """Context manager that seeds the sampling of actions and restores the global generators at the end.

    Agents sample with the global generator of torch; DQN uses that of NumPy. The random actions of DQN come
    from its action space, which is seeded, too, but not restored.
    """
    numpy_state = np.random.get_state()  # noqa: NPY002  # the generator that SB3 draws from
    for skill in skills:
        if isinstance(skill.agent, BaseAlgorithm):
            skill.agent.action_space.seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(numpy_state)  # noqa: NPY002


def _bar(enabled: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, disable=not enabled)


def _check_raw(env: VecEnv) -> None:
    if unwrap_vec_normalize(env) is not None:
        raise ValueError(
            "env has a VecNormalize, but a dataset stores raw observations and rewards: pass the "
            "environments without VecNormalize. An agent that was trained with VecNormalize still gets "
            "normalised observations"
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
            and of the first agent over 100 episodes each.
        progress_bar: show a progress bar.

    Raises:
        FileExistsError: if the dataset exists.
        ValueError: if dataset_id is not a Minari id, a number is out of range, or ``env`` has a
            ``VecNormalize``.
        TypeError: if an agent has no ``predict``, ``env`` is not an environment or an id, or Minari does not
            support its observation space.
        FaultyEnvironmentError: if an environment raises, or returns NaN or infinity.
        OSError: if the disk is full or not writable.

    Warns:
        UserWarning: if no spec that a dataset can store recreates the environment.
    """
    agents: list[Any] = list(agent) if isinstance(agent, list | tuple) else [agent]
    skills = plan_policies(agents, mix, target_returns, episodes)
    if n_envs < 1:
        raise ValueError(f"n_envs must be at least 1, got {n_envs}")
    with as_vectorized(env, min(n_envs, -(-episodes // len(skills)))) as vec_env:
        return record(
            skills,
            vec_env,
            dataset_id,
            episodes,
            deterministic=deterministic,
            seed=seed,
            author=author,
            algorithm_name=algorithm_name,
            reference_scores=reference_scores,
            progress_bar=progress_bar,
        )
