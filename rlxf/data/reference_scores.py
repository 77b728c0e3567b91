"""Reference scores that returns are normalized with, and the table of known tasks."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from gymnasium.envs.registration import EnvSpec
from numpy.typing import ArrayLike, NDArray

from rlxf.utils.warnings import warn_user

VERSION = 2
"""Version of the table; normalized scores are comparable only within a version."""

_D4RL = (
    f"rlxf's table of reference scores, version {VERSION}: "
    "D4RL, d4rl/infos.py of Farama-Foundation/D4RL at 0ace16de, REF_MIN_SCORE and REF_MAX_SCORE of {}; "
    "Fu et al. 2020, arXiv:2004.07219"
)


SMALLEST_RANGE = float(np.finfo(np.float32).tiny)
"""Smallest difference of reference scores: normalized scores of float32 returns are then finite."""


@dataclass(frozen=True)
class ReferenceScores:
    """Reference returns of the normalized score.

    Args:
        minimum: return of a random policy, with score 0.
        maximum: return of an expert, with score 100; greater than minimum, by at least `SMALLEST_RANGE`.
        source: source of the two numbers.

    Raises:
        ValueError: if minimum or maximum is not finite, or maximum is not greater than minimum by this range.
    """

    minimum: float
    maximum: float
    source: str

    def __post_init__(self) -> None:
        if not SMALLEST_RANGE <= self.maximum - self.minimum < math.inf:
            raise ValueError(
                f"reference scores must be finite, and the maximum greater than the minimum by at least "
                f"{SMALLEST_RANGE:.2g}, got {self.minimum} and {self.maximum} from {self.source}"
            )

    def normalize(self, returns: ArrayLike) -> NDArray[np.float64]:
        """Compute ``100 (R - minimum) / (maximum - minimum)``, without clipping to [0, 100].

        Source: Fu et al. 2020, arXiv:2004.07219, section 5.1. Minari's ``get_normalized_score`` is the same
        without the 100.
        """
        return 100 * (np.asarray(returns, np.float64) - self.minimum) / (self.maximum - self.minimum)


def _d4rl(minimum: float, maximum: float, datasets: str, measured: str) -> ReferenceScores:
    return ReferenceScores(minimum, maximum, f"{_D4RL.format(datasets)}. {measured}")


_MUJOCO = "Measured in version 2 of the environment with mujoco-py; later versions are similar, not equal"
_ADROIT = "Measured with dense rewards and D4RL's limits of 200 steps, for pen 100"
_MAZE = "The return is 1 when the goal was reached, after which the episode ends"
_KITCHEN = "The return is the number of tasks done, of four"

TABLE = {
    "HalfCheetah-v*": _d4rl(-280.178953, 12135.0, "halfcheetah-*", _MUJOCO),
    "Hopper-v*": _d4rl(-20.272305, 3234.3, "hopper-*", _MUJOCO),
    "Walker2d-v*": _d4rl(1.629008, 4592.3, "walker2d-*", _MUJOCO),
    "Ant-v*": _d4rl(-325.6, 3879.7, "ant-*", _MUJOCO),
    "AdroitHandPen-v*": _d4rl(96.262799, 3076.8331017826877, "pen-*", _ADROIT),
    "AdroitHandHammer-v*": _d4rl(-274.856578, 12794.134825156867, "hammer-*", _ADROIT),
    "AdroitHandRelocate-v*": _d4rl(-6.425911, 4233.877797728884, "relocate-*", _ADROIT),
    "AdroitHandDoor-v*": _d4rl(-56.512833, 2880.5693087298737, "door-*", _ADROIT),
    "AntMaze_*": _d4rl(0.0, 1.0, "antmaze-*", _MAZE),
    "FrankaKitchen-v*": _d4rl(0.0, 4.0, "kitchen-*", _KITCHEN),
}
"""Reference scores by pattern of Gymnasium ids; ``*`` matches anything."""
OTHER_REWARDS = ("*Dense-v*", "*Sparse-v*")
"""Patterns of variants with different rewards, such as ``AdroitHandPenSparse-v1``, which are excluded."""
CHANGING_ARGUMENTS = ("*_weight", "*healthy*", "xml_file", "frame_skip")
"""Patterns of arguments of MuJoCo environments that change rewards, dynamics or the end of an episode."""


def _has_default_returns(kwargs: Mapping[str, Any], reward_type: str = "dense") -> bool:
    changed = any(fnmatchcase(name, pattern) for name in kwargs for pattern in CHANGING_ARGUMENTS)
    return not changed and kwargs.get("reward_type", reward_type) == reward_type


def _ends_at_the_goal(kwargs: Mapping[str, Any]) -> bool:
    return _has_default_returns(kwargs, "sparse") and not kwargs.get("continuing_task", True)


def _counts_four_tasks(kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("remove_task_when_completed", True) and len(kwargs.get("tasks_to_complete", ())) == 4


COMPARABLE: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "AntMaze_*": _ends_at_the_goal,
    "FrankaKitchen-v*": _counts_four_tasks,
}
"""Key of `TABLE` -> whether returns of an environment with these arguments are comparable to its scores.

The defaults of Gymnasium-Robotics are ``continuing_task=True``, with which rewards accumulate at the goal,
and the seven tasks of the kitchen.
"""


def reference_scores(metadata: dict[str, Any], env_spec: EnvSpec | None) -> ReferenceScores | None:
    """Return the reference scores of a dataset, else those of its environment in `TABLE`, else None.

    Args:
        metadata: metadata of a Minari dataset with ``ref_min_score`` and ``ref_max_score``. Invalid values
            are ignored with a warning.
        env_spec: spec of its environment.
    """
    minimum = metadata.get("ref_min_score")
    maximum = metadata.get("ref_max_score")
    if minimum is not None and maximum is not None:
        try:
            return ReferenceScores(float(minimum), float(maximum), f"metadata of {metadata['dataset_id']}")
        except (TypeError, ValueError, OverflowError) as error:
            name = metadata["dataset_id"]
            warn_user(f"the reference scores of {name} are ignored: {error}")
    return None if env_spec is None else scores_from_table(env_spec.id, env_spec.kwargs)


def scores_from_table(env_id: str, env_kwargs: Mapping[str, Any] | None = None) -> ReferenceScores | None:
    """Return the reference scores of a Gymnasium id of any version from `TABLE`; None if not listed.

    Args:
        env_id: Gymnasium id, with or without a namespace.
        env_kwargs: arguments of the environment, those of its registration included. The result is None if
            returns with these arguments are not comparable to the scores.
    """
    name = env_id.rpartition("/")[2]
    if any(fnmatchcase(name, pattern) for pattern in OTHER_REWARDS):
        return None
    pattern = next((each for each in TABLE if fnmatchcase(name, each)), None)
    if pattern is None or not COMPARABLE.get(pattern, _has_default_returns)(env_kwargs or {}):
        return None
    return TABLE[pattern]
