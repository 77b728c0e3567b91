"""Recording of behavior policies into a dataset."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import minari
import numpy as np
import torch
from minari.data_collector import EpisodeBuffer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize

from rlxf.collection.describing import describe
from rlxf.collection.environment_spec import recreatable_spec
from rlxf.collection.playing import play
from rlxf.collection.references import find_references
from rlxf.collection.skills import Skill
from rlxf.collection.stored import stored_space
from rlxf.collection.writing import check_new, write_dataset
from rlxf.envs.trajectories import ReferenceScores
from rlxf.evaluation.tally import quotas


def record(
    skills: Sequence[Skill],
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
    observation_space = stored_space(env.observation_space)
    counts = quotas(episodes, len(skills)).tolist()
    with _seeded_sampling(skills, seed), _bar(progress_bar) as progress:
        references = reference_scores or find_references(skills[0], env, seed)
        spec = recreatable_spec(env)
        metadata = describe(skills, counts, spec, references, seed, author, algorithm_name)
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
    skills: Sequence[Skill], counts: Sequence[int], env: VecEnv, deterministic: bool, seed: int
) -> Iterator[EpisodeBuffer]:
    """Yield the episodes of one policy after the other, with different environment seeds for each policy."""
    for number, (skill, count) in enumerate(zip(skills, counts, strict=True)):
        yield from play(skill, env, count, deterministic, seed + number * env.num_envs)


@contextmanager
def _seeded_sampling(skills: Sequence[Skill], seed: int) -> Iterator[None]:
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
