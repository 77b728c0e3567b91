"""Computation of returns-to-go."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def return_to_go(rewards: ArrayLike) -> NDArray[np.float64]:
    """Compute ``R_t = r_t + r_(t+1) + ... + r_(T-1)`` for the rewards (T,) of an episode, in float64.

    There is no discount.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3.
    """
    return np.cumsum(np.asarray(rewards, np.float64)[::-1])[::-1]
