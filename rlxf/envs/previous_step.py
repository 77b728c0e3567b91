"""Wrapper that adds the previous action and reward to the observation."""

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlxf.envs.previous_reward import PreviousReward

ACTION = "previous_action"


class PreviousStep(PreviousReward):
    """Wrapper that makes the observation a Dict and adds the previous action and reward; zeros at reset.

    The keys are those of `PreviousReward`, and

    - ``previous_action`` float32 (A,): one-hot for Discrete; concatenated one-hots for MultiDiscrete; the
      flattened numbers for Box and MultiBinary.

    A recurrent policy then has actions and rewards in its memory, with any MultiInput policy (RL^2: Duan et
    al. 2016, arXiv:1611.02779, section 2.2).

    Args:
        env: an environment with a supported space (`check_spaces`).

    Raises:
        TypeError: if a space is not supported.
        ValueError: if the inner Dict already has one of the two keys.
    """

    def _added_spaces(self) -> dict[str, spaces.Box]:
        return {ACTION: _encoded_space(self.env.action_space), **super()._added_spaces()}

    def _added(self, action: Any, reward: Any) -> dict[str, np.ndarray]:
        return {ACTION: encode_action(self.env.action_space, action), **super()._added(action, reward)}


def encode_action(space: spaces.Space, action: Any) -> NDArray[np.float32]:
    """Encode an ``action`` of ``space`` as float32 (A,): Discrete parts one-hot, others flattened."""
    return np.asarray(spaces.flatten(space, action), dtype=np.float32)


def _encoded_space(action_space: spaces.Space) -> spaces.Box:
    flat = spaces.flatten_space(action_space)
    assert isinstance(flat, spaces.Box)  # true for every space that check_spaces accepts
    low, high = np.minimum(flat.low, 0), np.maximum(flat.high, 0)  # the zeros at reset must lie inside
    return spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
