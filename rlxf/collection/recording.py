"""From skills to a dataset."""

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
    """Record episodes of all skills, an equal number of each, into a new dataset; see `collect`."""
    check_new(dataset_id)
    _check_raw(env)
    observation_space = stored_space(env.observation_space)
    counts = quotas(episodes, len(skills)).tolist()
    with _sampling(skills, seed), _bar(progress_bar) as progress:
        references = reference_scores or find_references(skills[0], env, seed)
        spec = recreatable_spec(env)
        metadata = describe(skills, counts, spec, references, seed, author, algorithm_name)
        played = _all(skills, counts, env, deterministic, seed)
        return write_dataset(
            dataset_id,
            progress.track(played, total=episodes, description="collect"),
            observation_space,
            env.action_space,
            spec,
            metadata,
        )


def _all(
    skills: Sequence[Skill], counts: Sequence[int], env: VecEnv, deterministic: bool, seed: int
) -> Iterator[EpisodeBuffer]:
    """The episodes of one skill after the other; no two of them share a seed of an environment."""
    for number, (skill, count) in enumerate(zip(skills, counts, strict=True)):
        yield from play(skill, env, count, deterministic, seed + number * env.num_envs)


@contextmanager
def _sampling(skills: Sequence[Skill], seed: int) -> Iterator[None]:
    """Agents sample with the global generators of torch and, DQN, numpy: seeded here, afterwards as before.

    DQN's random actions come from its own action space, which is seeded, too.
    """
    before = np.random.get_state()  # noqa: NPY002  # it is the one that SB3 draws from
    for skill in skills:
        if isinstance(skill.agent, BaseAlgorithm):
            skill.agent.action_space.seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(before)  # noqa: NPY002


def _bar(shown: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, disable=not shown)


def _check_raw(env: VecEnv) -> None:
    if unwrap_vec_normalize(env) is not None:
        raise ValueError(
            "env normalises what it shows, and a dataset keeps raw observations and rewards: pass the "
            "environments without VecNormalize. An agent that was trained so still sees them normalised"
        )
