"""Small environment whose episodes end at random, for tests of wrappers and vector environments."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


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
