"""Table of reference scores by environment, for datasets without their own."""

from dataclasses import dataclass

VERSION = 2
"""Version of the table; normalized scores are comparable only within a version."""

_D4RL = (
    "D4RL, d4rl/infos.py of Farama-Foundation/D4RL at 0ace16de, REF_MIN_SCORE and REF_MAX_SCORE of {}; "
    "Fu et al. 2020, arXiv:2004.07219"
)


@dataclass(frozen=True)
class Row:
    """Reference scores of an environment.

    Args:
        environments: patterns of Gymnasium ids; ``*`` matches anything.
        minimum: return of a random policy.
        maximum: return of an expert.
        source: publication of the numbers, and the environment of their measurement if it differs.
        besides: patterns of ids to exclude, such as variants with other rewards.
    """

    environments: tuple[str, ...]
    minimum: float
    maximum: float
    source: str
    besides: tuple[str, ...] = ()


def _d4rl(pattern: str, minimum: float, maximum: float, datasets: str, measured: str) -> Row:
    source = f"{_D4RL.format(datasets)}. {measured}"
    return Row((pattern,), minimum, maximum, source, besides=("*Dense-v*", "*Sparse-v*"))


_MUJOCO = "Measured in version 2 of the environment with mujoco-py; later versions are similar, not equal"
_ADROIT = "Measured with dense rewards and D4RL's limits of 200 steps, for pen 100"
_MAZE = "The return is 1 when the goal was reached, after which the episode ends"
_KITCHEN = "The return is the number of tasks done, of four"

TABLE = (
    _d4rl("HalfCheetah-v*", -280.178953, 12135.0, "halfcheetah-*", _MUJOCO),
    _d4rl("Hopper-v*", -20.272305, 3234.3, "hopper-*", _MUJOCO),
    _d4rl("Walker2d-v*", 1.629008, 4592.3, "walker2d-*", _MUJOCO),
    _d4rl("Ant-v*", -325.6, 3879.7, "ant-*", _MUJOCO),
    _d4rl("AdroitHandPen-v*", 96.262799, 3076.8331017826877, "pen-*", _ADROIT),
    _d4rl("AdroitHandHammer-v*", -274.856578, 12794.134825156867, "hammer-*", _ADROIT),
    _d4rl("AdroitHandRelocate-v*", -6.425911, 4233.877797728884, "relocate-*", _ADROIT),
    _d4rl("AdroitHandDoor-v*", -56.512833, 2880.5693087298737, "door-*", _ADROIT),
    _d4rl("AntMaze_*", 0.0, 1.0, "antmaze-*", _MAZE),
    _d4rl("FrankaKitchen-v*", 0.0, 4.0, "kitchen-*", _KITCHEN),
)
"""Variants with other rewards, such as ``AdroitHandPenSparse-v1``, are excluded."""
