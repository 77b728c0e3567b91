"""Environment with negligible cost, for benchmarks of training.

It only requires gymnasium, 0.29 or 1.x, so that programs with other pinned versions can use the same task.
`gymnasium.make("light_task:LightTask-v0")` imports this file and creates the environment.
"""

from typing import Any

import gymnasium
import numpy as np

EPISODE_STEPS = 119
"""Episode length: that of MortarMayhem-Grid-v0, the default task of CleanRL's ppo_trxl.py."""


class LightTask(gymnasium.Env[np.ndarray, np.int64]):
    """Environment that shows one of four cues at the first step, and rewards its index with 1 at each step.

    Observation (4,) float32: the one-hot cue at the first step of the episode, then zeros. Action: 0 to 3.
    """

    metadata: dict[str, Any] = {"render_modes": ["debug_rgb_array"]}  # noqa: RUF012 - as in Gymnasium
    observation_space = gymnasium.spaces.Box(0.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode
        self._cue = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._cue = int(self.np_random.integers(4))
        return np.eye(4, dtype=np.float32)[self._cue], {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(4, np.float32), float(action == self._cue), False, False, {}

    def render(self) -> np.ndarray:
        return np.zeros((8, 8, 3), np.uint8)


gymnasium.register("LightTask-v0", entry_point=f"{__name__}:LightTask", max_episode_steps=EPISODE_STEPS)
