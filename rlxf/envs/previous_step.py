"""The previous action and reward as part of the observation."""

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlxf.envs.previous_reward import PreviousReward

ACTION = "previous_action"


class PreviousStep(PreviousReward):
    """The observation becomes a Dict with the action and the reward of the step before; zeros at reset.

    As `PreviousReward`, and

    - ``previous_action`` float32 (A,): one-hot for Discrete; the parts' one-hots in a row for MultiDiscrete;
      the numbers themselves, flattened, for Box and MultiBinary.

    What the agent did and got is then in its memory, with any MultiInput policy and in every tool that steps
    the environment (RL^2: Duan et al. 2016, arXiv:1611.02779, section 2.2).

    Args:
        env: an environment with a supported space (`check_spaces`).

    Raises:
        TypeError: if a space is not supported.
        ValueError: if the inner Dict already has one of the two keys.
    """

    def _added_spaces(self) -> dict[str, spaces.Box]:
        return {ACTION: _encoded(self.env.action_space), **super()._added_spaces()}

    def _added(self, action: Any, reward: Any) -> dict[str, np.ndarray]:
        return {ACTION: encode_action(self.env.action_space, action), **super()._added(action, reward)}


def encode_action(space: spaces.Space, action: Any) -> NDArray[np.float32]:
    """``action`` of ``space`` as float32 (A,): Discrete parts one-hot, others flattened."""
    return np.asarray(spaces.flatten(space, action), dtype=np.float32)


def _encoded(action_space: spaces.Space) -> spaces.Box:
    flat = spaces.flatten_space(action_space)
    assert isinstance(flat, spaces.Box)  # as for every space that check_spaces lets through
    low, high = np.minimum(flat.low, 0), np.maximum(flat.high, 0)  # zeros at reset must lie inside
    return spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
