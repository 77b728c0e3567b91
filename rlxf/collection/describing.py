"""Metadata of recorded datasets."""

from collections.abc import Sequence
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from rlxf import __version__
from rlxf.collection.references import as_metadata
from rlxf.collection.skills import Skill
from rlxf.envs.trajectories import ReferenceScores


def describe(
    skills: Sequence[Skill],
    counts: Sequence[int],
    spec: EnvSpec | None,
    references: ReferenceScores | None,
    seed: int,
    author: str | None,
    algorithm_name: str | None,
) -> dict[str, Any]:
    """Return Minari metadata: policies and their episodes, seed, versions and reference scores.

    Args:
        skills: policies that were recorded.
        counts: number of episodes of each policy.
        spec: spec of the environment; None if unknown.
        references: reference scores; None if unknown.
        seed: seed of the recording.
        author: author of the dataset; None for no author.
        algorithm_name: algorithm name; None for the names of the agents' classes.
    """
    names = dict.fromkeys("random" if skill.agent is None else type(skill.agent).__name__ for skill in skills)
    played = "; ".join(f"{count} episodes of {skill}" for skill, count in zip(skills, counts, strict=True))
    env_name = "An environment without a spec" if spec is None else spec.id
    versions = f"Recorded by rlxf {__version__} with gymnasium {gymnasium.__version__}, seed {seed}."
    source = "" if references is None else f" Reference scores: {references.source}."
    return {
        "algorithm_name": algorithm_name or ", ".join(names),
        "description": f"{env_name}: {played}. {versions}{source}",
        **({} if author is None else {"author": {author}}),
        **({} if references is None else as_metadata(references)),
    }
