"""From agents to a dataset."""

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
    """Record agents into a new Minari dataset: what their environments show, what they do and what that pays.

    Whole episodes are recorded, from environments side by side, of which each contributes its share. The last
    observation of an episode is kept, and whether it was terminated or truncated. Floats are stored as
    float32, images without loss. The file grows while episodes are played and is renamed at the end: what
    fails on the way leaves nothing behind.

    An agent that was trained under ``VecNormalize`` sees observations as it did then; recorded are raw ones.

    Args:
        agent: has SB3's ``predict``; None acts at random. Of several, which may be the same at different
            stages of training, each plays an equal share of the episodes.
        env: a Gymnasium id, an ``Env``, a Gymnasium ``VectorEnv`` or an SB3 ``VecEnv``; no ``VecNormalize``.
        dataset_id: a new Minari id, ``namespace/name-v0``; kept in Minari's folder (MINARI_DATASETS_PATH).
        episodes: to record in all.
        mix: shares of random actions, from 0 to 1. Each agent plays an equal number of episodes with each:
            (0, 0.5, 1) records it as it is, half at random, and random play.
        target_returns: what the agents are asked for, by `ReturnToGo`: an equal number of episodes each. None
            for agents that are not asked.
        deterministic: the most likely action instead of a sample.
        n_envs: environments to make when ``env`` is an id.
        seed: of environments, random actions and samples.
        author: of the dataset, for its metadata.
        algorithm_name: for the metadata; None for the names of the agents' classes.
        reference_scores: returns that count as 0 and as 100; None for those of the environment in the table
            shipped here or of the data that the first agent learned from, else the mean returns of a random
            policy and of the first agent, 100 episodes each.
        progress_bar: show one.

    Raises:
        FileExistsError: if there is such a dataset.
        ValueError: if it is no Minari id, a number is out of range, or ``env`` normalises.
        TypeError: if an agent cannot predict, ``env`` is nothing to play in, or it shows what Minari does not
            keep.
        FaultyEnvironmentError: if an environment fails, or gives NaN or infinity.
        OSError: if the disk is full or cannot be written.

    Warns:
        UserWarning: if nothing that a dataset can keep makes the environment again.
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
