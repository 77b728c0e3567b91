"""Small environments with all kinds of spaces, and with episodes that end at random."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

LENGTH = 4
VIEW = spaces.Box(0, 255, (7, 7, 3), np.uint8)


class Words(spaces.Space):
    """Text space that is not a Gymnasium ``Text``, like MiniGrid's missions."""

    def __init__(self):
        super().__init__(dtype=str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return f"get the {('ball', 'key')[int(self.np_random.integers(2))]}"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Words)


OBSERVATIONS = {
    "nested Dict": spaces.Dict(
        {
            "body": spaces.Dict({"position": spaces.Box(-9, 9, (2,), np.float32), "eye": VIEW}),
            "alarm": spaces.MultiBinary(2),
        }
    ),
    "Tuple": spaces.Tuple([spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2, 2), np.float32)]),
    "Tuple in a Dict": spaces.Dict(
        {"pair": spaces.Tuple([spaces.Discrete(2), spaces.MultiDiscrete([2, 3])]), "a": spaces.Discrete(4)}
    ),
    "MiniGrid's": spaces.Dict({"direction": spaces.Discrete(4), "image": VIEW, "mission": spaces.Text(14)}),
    "Tuple with text": spaces.Tuple([spaces.Text(5), spaces.Box(-1, 1, (2,), np.float32)]),
    "other words": spaces.Dict({"direction": spaces.Discrete(4), "image": VIEW, "mission": Words()}),
    "choice from 2": spaces.Discrete(4, start=2),
}
ACTIONS = {
    "Discrete": spaces.Discrete(3),
    "Discrete from 1": spaces.Discrete(2, start=1),
    "MultiDiscrete from elsewhere": spaces.MultiDiscrete([2, 3], start=[-1, 4]),
    "MultiBinary": spaces.MultiBinary(2),
}


class AnySpace(gymnasium.Env):
    """Environment with random observations and rewards equal to the sum of the numbers of the action.

    An action outside the action space is an error. Episodes have 4 steps; every second one is truncated.
    """

    def __init__(self, observations: str = "nested Dict", actions: str = "Discrete"):
        self.observation_space, self.action_space = OBSERVATIONS[observations], ACTIONS[actions]
        self.time = self.episode = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.time, self.episode = 0, self.episode + 1
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.time += 1
        done, truncated = self.time == LENGTH, self.episode % 2 == 0
        return self._observe(), float(np.sum(action)), done and not truncated, done and truncated, {}

    def _observe(self) -> Any:
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()


gymnasium.register("rlxf-test/AnySpace-v0", entry_point="tests.envs.small_envs:AnySpace")


def any_space_env(observations="nested Dict", actions="Discrete"):
    """Make an `AnySpace` by its id."""
    return gymnasium.make("rlxf-test/AnySpace-v0", observations=observations, actions=actions)


class Counter(gymnasium.Env):
    """Observation [episode, step]; random rewards; steps terminate or truncate the episode at random."""

    def __init__(self, as_dict: bool = False, render_mode: str | None = None):
        box = spaces.Box(0.0, 1e6, (2,), np.float32)
        self.observation_space = spaces.Dict({"count": box, "last": spaces.Discrete(3)}) if as_dict else box
        self.action_space = spaces.Discrete(3)
        self.render_mode = render_mode
        self.count = np.zeros(2, dtype=np.float32)
        self.label = "first"

    def _observe(self, last: int) -> Any:
        count = self.count.copy()
        return {"count": count, "last": last} if isinstance(self.observation_space, spaces.Dict) else count

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count = np.array([self.count[0] + 1, 0], dtype=np.float32)
        return self._observe(0), {"options": str(options)}

    def step(self, action: int) -> Any:
        self.count[1] += 1
        terminated, truncated = (bool(chance < 0.2) for chance in self.np_random.random(2))
        reward = float(action) + float(self.np_random.integers(8)) / 8
        return self._observe(int(action)), reward, terminated, truncated, {"is_success": terminated}

    def render(self) -> Any:
        return np.full((4, 4, 3), int(self.count[1]), dtype=np.uint8)

    def shout(self, word: str) -> str:
        return word.upper()
