"""Classic control tasks without velocities, for which an agent needs memory.

The observation space stays the same; velocities are 0. The ids are those of RL Baselines3 Zoo with the prefix
``rlxf/``: ``rlxf/CartPoleNoVel-v1``, ``rlxf/PendulumNoVel-v1``, ``rlxf/MountainCarContinuousNoVel-v0`` and
``rlxf/LunarLanderNoVel-v3``.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

NO_LIMIT = -1
"""Time limit for `gymnasium.make` that removes that of the task. The registered id has it instead."""


class MaskedVelocities(gymnasium.ObservationWrapper):
    """Wrapper that sets elements of a vector observation to 0. It is a part of the tasks of this file.

    Args:
        env: environment with a vector as observation.
        velocities: positions of the elements in the observation, from 0.
    """

    def __init__(self, env: gymnasium.Env, velocities: Sequence[int]):
        super().__init__(env)
        self._velocities = list(velocities)

    @property
    def spec(self) -> EnvSpec | None:  # type: ignore[override]  # as in `gymnasium.Wrapper`
        """Spec of the task, which includes this wrapper."""
        return self.env.spec

    def observation(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a copy of the observation without the velocities."""
        masked = observation.copy()
        masked[self._velocities] = 0
        return masked


def cart_pole(**kwargs: Any) -> gymnasium.Env:
    """``CartPole-v1`` without the velocities of the cart and of the pole."""
    return MaskedVelocities(gymnasium.make("CartPole-v1", max_episode_steps=NO_LIMIT, **kwargs), (1, 3))


def pendulum(**kwargs: Any) -> gymnasium.Env:
    """``Pendulum-v1`` without the angular velocity."""
    return MaskedVelocities(gymnasium.make("Pendulum-v1", max_episode_steps=NO_LIMIT, **kwargs), (2,))


def mountain_car_continuous(**kwargs: Any) -> gymnasium.Env:
    """``MountainCarContinuous-v0`` without the velocity of the car."""
    return MaskedVelocities(
        gymnasium.make("MountainCarContinuous-v0", max_episode_steps=NO_LIMIT, **kwargs), (1,)
    )


def lunar_lander(**kwargs: Any) -> gymnasium.Env:
    """``LunarLander-v3`` without its two velocities and the angular velocity; needs the extra ``box2d``."""
    return MaskedVelocities(gymnasium.make("LunarLander-v3", max_episode_steps=NO_LIMIT, **kwargs), (2, 3, 5))
