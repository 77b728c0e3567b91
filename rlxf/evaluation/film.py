"""Recording of the rendered frames of an episode."""

import math
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from stable_baselines3.common.type_aliases import PolicyPredictor

from rlxf.evaluation.display import draw_off_screen
from rlxf.evaluation.environment import opened

RENDER_MODE = "rgb_array"
LONGEST = 500
"""Maximum number of recorded steps of an episode."""
SIDE = 320
"""Maximum height and width of a frame in pixels; larger frames are reduced by an integer factor."""


class Filmed(gymnasium.Wrapper):
    """Wrapper that records a frame of each state, including the last state before a ``VecEnv`` resets.

    It renders off screen on machines without a display (`draw_off_screen`).

    Attributes:
        episodes: frames of each episode, uint8 (H, W, 3).
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        draw_off_screen()
        self.episodes: list[list[NDArray[np.uint8]]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the environment and start the frames of a new episode."""
        result = super().reset(seed=seed, options=options)
        self.episodes.append([self._frame()])
        return result

    def step(self, action: Any) -> Any:
        """Step the environment and record a frame."""
        result = super().step(action)
        self.episodes[-1].append(self._frame())
        return result

    def _frame(self) -> NDArray[np.uint8]:
        frame = np.asarray(self.render())
        reduced = Image.fromarray(frame).reduce(math.ceil(max(frame.shape[:2]) / SIDE))
        return np.asarray(reduced)


def film(
    agent: PolicyPredictor, env: gymnasium.Env, seed: int | None, deterministic: bool
) -> NDArray[np.uint8]:
    """Play an episode, at most 500 steps, and return its T frames, uint8 (T, H, W, 3).

    Args:
        agent: object with SB3's ``predict``; observations are normalised as in its training.
        env: environment created with ``render_mode="rgb_array"``; it stays open.
        seed: seed of the episode.
        deterministic: use the most likely action instead of a sample.
    """
    filmed = Filmed(env)
    with opened(agent, filmed, 1, seed) as vec_env:
        obs, state, starts = vec_env.reset(), None, np.ones(1, dtype=bool)
        for _ in range(LONGEST):
            actions, state = agent.predict(obs, state, starts, deterministic)  # type: ignore[arg-type]
            obs, _, starts, _ = vec_env.step(actions)
            if starts[0]:
                break
    return np.stack(filmed.episodes[0])


def check_can_film(env: gymnasium.Env) -> None:
    """Raise unless the environment renders images. The check resets the environment.

    Raises:
        TypeError: if env is not a single Gymnasium environment.
        ValueError: if env was created without ``render_mode="rgb_array"``, or rendering fails.
    """
    if not isinstance(env, gymnasium.Env):
        raise TypeError(f"a video needs one gymnasium.Env with render_mode='rgb_array', got {env!r}")
    if env.render_mode != RENDER_MODE:
        supported = env.metadata.get("render_modes", [])
        advice = (
            f"create it with render_mode={RENDER_MODE!r}"
            if RENDER_MODE in supported
            else "it cannot be recorded"
        )
        raise ValueError(f"{env} has render_mode={env.render_mode!r} and supports {supported}: {advice}")
    try:
        Filmed(env).reset()
    except Exception as error:  # missing drivers, displays and packages raise various exceptions
        raise ValueError(f"{env} cannot be rendered: {error!r}; correct it, or record no video") from error
