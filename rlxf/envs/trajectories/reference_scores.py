"""Normalized scores: returns on a scale from a random policy (0) to an expert policy (100)."""

import math
import warnings
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from gymnasium.envs.registration import EnvSpec
from numpy.typing import ArrayLike, NDArray

from rlxf.envs.trajectories.score_table import TABLE, VERSION


@dataclass(frozen=True)
class ReferenceScores:
    """Reference returns of the normalized score.

    Args:
        minimum: return of a random policy, with score 0.
        maximum: return of an expert, with score 100; greater than minimum.
        source: source of the two numbers.

    Raises:
        ValueError: if minimum or maximum is not finite, or maximum is not greater than minimum.
    """

    minimum: float
    maximum: float
    source: str

    def __post_init__(self) -> None:
        if not (math.isfinite(self.maximum - self.minimum) and self.maximum > self.minimum):
            given = f"{self.minimum} and {self.maximum} from {self.source}"
            raise ValueError(
                f"reference scores must be finite, and the maximum greater than the minimum, got {given}"
            )

    def normalize(self, returns: ArrayLike) -> NDArray[np.float64]:
        """Compute ``100 (R - minimum) / (maximum - minimum)``, without clipping to [0, 100].

        Source: Fu et al. 2020, arXiv:2004.07219, section 5.1. Minari's ``get_normalized_score`` is the same
        without the 100.
        """
        return 100 * (np.asarray(returns, np.float64) - self.minimum) / (self.maximum - self.minimum)


def reference_scores(metadata: dict[str, Any], env_spec: EnvSpec | None) -> ReferenceScores | None:
    """Return the reference scores of a dataset, else those of its environment in `TABLE`, else None.

    Args:
        metadata: metadata of a Minari dataset with ``ref_min_score`` and ``ref_max_score``. Invalid values
            are ignored with a warning.
        env_spec: spec of its environment.
    """
    own = metadata.get("ref_min_score"), metadata.get("ref_max_score")
    if own[0] is not None and own[1] is not None:
        try:
            return ReferenceScores(float(own[0]), float(own[1]), f"metadata of {metadata['dataset_id']}")
        except (TypeError, ValueError) as error:
            warnings.warn(f"{error}; those of {metadata['dataset_id']} are ignored", stacklevel=2)
    return None if env_spec is None else tabled_scores(env_spec.id)


def tabled_scores(env_id: str) -> ReferenceScores | None:
    """Return the reference scores of a Gymnasium id of any version from `TABLE`; None if not listed."""
    name = env_id.rpartition("/")[2]
    for row in TABLE:
        if _matches(name, row.environments) and not _matches(name, row.besides):
            source = f"rlxf's table of reference scores, version {VERSION}: {row.source}"
            return ReferenceScores(row.minimum, row.maximum, source)
    return None


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
