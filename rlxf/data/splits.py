"""Split of episodes into those to train on and those held out for validation."""

import numpy as np
from numpy.typing import NDArray

from rlxf.utils.checks import check_between

Episodes = NDArray[np.int64]


def split_episodes(episodes: Episodes, fraction: float, seed: int) -> tuple[Episodes, Episodes]:
    """Split episodes at random into two parts, of which each has at least one.

    The held-out part has ``round(fraction n)`` of n episodes, at least 1 and at most n - 1. Equal arguments
    give equal parts, so agents with different seeds can be compared on the same held-out episodes.

    Args:
        episodes: numbers of the n episodes, int64 (n,).
        fraction: fraction of the episodes to hold out, above 0 and below 1.
        seed: seed of the random order.

    Returns:
        Numbers of the episodes to train on, and of the held-out ones, each in ascending order.

    Raises:
        TypeError: if fraction is not a number.
        ValueError: if fraction is out of range, or there are fewer than two episodes.
    """
    check_between("validation_fraction", fraction, 0, 1, inclusive="neither")
    if len(episodes) < 2:
        raise ValueError(
            f"validation_fraction={fraction:g} holds out episodes, which needs at least two, got "
            f"{len(episodes)}: use validation_fraction=None, or more data"
        )
    count = min(max(1, round(fraction * len(episodes))), len(episodes) - 1)
    order = np.random.default_rng(seed).permutation(episodes)
    return np.sort(order[count:]), np.sort(order[:count])
