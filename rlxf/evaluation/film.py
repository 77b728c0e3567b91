"""Pictures of an episode, from its first state to its last."""

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
"""Steps after which a film ends, if the episode does not."""
SIDE = 320
"""Pixels that no side of a picture exceeds; larger ones are reduced by a whole factor."""


class Filmed(gymnasium.Wrapper):
    """Takes a picture of each state; of the last one too, before a ``VecEnv`` resets it away.

    It draws without a display where there is none (`draw_off_screen`).

    Attributes:
        episodes: the pictures of each episode, uint8 (H, W, 3).
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        draw_off_screen()
        self.episodes: list[list[NDArray[np.uint8]]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin another episode."""
        begun = super().reset(seed=seed, options=options)
        self.episodes.append([self._picture()])
        return begun

    def step(self, action: Any) -> Any:
        """One step of the environment."""
        taken = super().step(action)
        self.episodes[-1].append(self._picture())
        return taken

    def _picture(self) -> NDArray[np.uint8]:
        picture = np.asarray(self.render())
        reduced = Image.fromarray(picture).reduce(math.ceil(max(picture.shape[:2]) / SIDE))
        return np.asarray(reduced)


def film(
    agent: PolicyPredictor, env: gymnasium.Env, seed: int | None, deterministic: bool
) -> NDArray[np.uint8]:
    """One episode, or the first 500 steps of it, as T pictures, (T, H, W, 3).

    Args:
        agent: plays it; observations are normalised as in its training.
        env: made with ``render_mode="rgb_array"``; stays open.
        seed: of the episode.
        deterministic: the most likely action instead of a sample.
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
    """Raise unless the environment gives pictures; resets it.

    Raises:
        TypeError: if it is no single Gymnasium environment.
        ValueError: if it was made without ``render_mode="rgb_array"``, or fails to draw.
    """
    if not isinstance(env, gymnasium.Env):
        raise TypeError(f"a film needs one gymnasium.Env, made with render_mode='rgb_array'; got {env!r}")
    if env.render_mode != RENDER_MODE:
        offered = env.metadata.get("render_modes", [])
        advice = (
            f"make it with render_mode={RENDER_MODE!r}" if RENDER_MODE in offered else "it cannot be filmed"
        )
        raise ValueError(f"{env} has render_mode={env.render_mode!r} and offers {offered}: {advice}")
    try:
        Filmed(env).reset()
    except Exception as error:  # drivers, displays, packages that are not there: each has errors of its own
        raise ValueError(f"{env} does not draw: {error!r}; repair that, or do without a film") from error
