"""What a dataset says of itself."""

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
    """Metadata as Minari keeps them: who played what how often, seed, versions, reference scores.

    Args:
        skills: who played.
        counts: episodes of each.
        spec: of the environment.
        references: reference scores.
        seed: of all of it.
        author: of the dataset; None for nobody.
        algorithm_name: None for the names of the agents' classes.
    """
    names = dict.fromkeys("random" if skill.agent is None else type(skill.agent).__name__ for skill in skills)
    played = "; ".join(f"{count} episodes of {skill}" for skill, count in zip(skills, counts, strict=True))
    place = "An environment without a spec" if spec is None else spec.id
    versions = f"Recorded by rlxf {__version__} with gymnasium {gymnasium.__version__}, seed {seed}."
    source = "" if references is None else f" Reference scores: {references.source}."
    return {
        "algorithm_name": algorithm_name or ", ".join(names),
        "description": f"{place}: {played}. {versions}{source}",
        **({} if author is None else {"author": {author}}),
        **({} if references is None else as_metadata(references)),
    }
