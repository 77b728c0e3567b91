"""Recording of agents into a Minari dataset."""

from collections.abc import Sequence
from typing import Any

import minari

from rlxf.collection.recording import record
from rlxf.collection.skills import Agent, plan
from rlxf.envs.trajectories import ReferenceScores
from rlxf.evaluation.environment import EnvLike, vectorised


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

    An agent trained with ``VecNormalize`` gets normalised observations, but the dataset has raw ones.

    Args:
        agent: object with SB3's ``predict``, or None for random actions. Each of several agents, for example
            checkpoints of one training, plays an equal share of the episodes.
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
        reference_scores: returns with normalised scores 0 and 100. None takes those of the first agent's data
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
    skills = plan(agents, mix, target_returns, episodes)
    if n_envs < 1:
        raise ValueError(f"n_envs must be at least 1, got {n_envs}")
    with vectorised(env, min(n_envs, -(-episodes // len(skills)))) as vec_env:
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
