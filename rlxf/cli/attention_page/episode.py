"""Recorded episode: actions, rewards, observations and frames as text and data URIs."""

import base64
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from stable_baselines3.common.vec_env import VecEnv

from rlxf.cli.playback import IMAGES, Task
from rlxf.envs.gym_api import reset_env
from rlxf.evaluation.rollout import play
from rlxf.evaluation.video import FrameRecorder, check_rendering
from rlxf.utils.warnings import warn_user

MAX_NUMBERS = 32
"""Largest number of components of an observation or action that the page shows."""
MAX_INFO = 8
MAX_TEXT = 200
"""Largest number of values in an info, and of characters in each of them, that the page shows."""
JPEG_QUALITY = 85


@dataclass(frozen=True)
class Step:
    """Step of an episode.

    Args:
        observation: text of the observation before the action.
        action: text of the action.
        reward: reward of the step.
        info: text of each short value in the info after the step, by name.
    """

    observation: str
    action: str
    reward: float
    info: dict[str, str]


class StepRecorder(gymnasium.Wrapper):
    """Wrapper that records the steps of the first episode.

    Args:
        env: the environment.

    Attributes:
        steps: the steps.
        end: "terminated" or "truncated"; "cut" as long as the episode goes on.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self.steps: list[Step] = []
        self.end = "cut"
        self._observation: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the environment and keep the observation."""
        result = reset_env(self.env, seed, options)
        self._observation = result[0]
        return result

    def step(self, action: Any) -> Any:
        """Step the environment and record the step, unless the first episode has ended."""
        result = super().step(action)
        observation, reward, terminated, truncated, info = result
        if self.end == "cut":
            step = Step(
                observation=numbers_text(self._observation),
                action=numbers_text(action),
                reward=float(reward),
                info=info_text(info),
            )
            self.steps.append(step)
            self.end = "terminated" if terminated else "truncated" if truncated else "cut"
        self._observation = observation
        return result


def numbers_text(value: Any) -> str:
    """Return the numbers of an observation or action as text, with a limited length."""
    if isinstance(value, dict):
        return "; ".join(f"{_short(key)}: {numbers_text(part)}" for key, part in value.items())
    if isinstance(value, str):
        return _short(value)
    if isinstance(value, tuple):
        return "; ".join(map(numbers_text, value))
    flat = np.asarray(value).reshape(-1)
    shown = ", ".join(f"{number:.4g}" for number in flat[:MAX_NUMBERS].astype(float))
    return f"{shown}, ... ({flat.size} numbers)" if flat.size > MAX_NUMBERS else shown


def info_text(info: dict[str, Any]) -> dict[str, str]:
    """Return the numbers and texts in an info, at most 8."""
    plain = {name: value for name, value in info.items() if isinstance(value, str | int | float | np.generic)}
    return {_short(name): _short(value) for name, value in islice(plain.items(), MAX_INFO)}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def data_uri(frame: NDArray[np.uint8]) -> str:
    """Encode a frame (H, W, 3) as a data URI: as PNG, or as JPEG where that is smaller."""
    image = Image.fromarray(frame).convert("RGB")
    files = {}
    for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": JPEG_QUALITY})):
        image.save(file := BytesIO(), kind, **options)
        files[kind] = file.getvalue()
    kind = min(files, key=lambda name: len(files[name]))
    return f"data:image/{kind};base64,{base64.b64encode(files[kind]).decode('ascii')}"


@dataclass(frozen=True)
class Recording:
    """Environment of one episode with its recorders.

    Args:
        env: the environment with all recorders.
        steps: recorder of the steps.
        frames: recorder of the frames; None if the environment renders no images.
    """

    env: gymnasium.Env
    steps: StepRecorder
    frames: FrameRecorder | None

    @classmethod
    def of_task(cls, task: Task, limit: int) -> "Recording":
        """Create the environment of a task, with frames if it can render them.

        Warns:
            UserWarning: if the environment supports images and rendering fails.
        """
        if IMAGES in task.modes and (env := _rendering_env(task)) is not None:
            frames = FrameRecorder(env, limit + 1)
            steps = StepRecorder(frames)
            return cls(steps, steps, frames)
        steps = StepRecorder(task.make(None))
        return cls(steps, steps, None)

    def play(self, agent: Any, vec_env: VecEnv, seed: int, limit: int) -> None:
        """Play one episode with the most likely actions, at most ``limit`` steps."""
        vec_env.seed(seed)
        for _, dones, _ in islice(play(agent, vec_env, deterministic=True), limit):
            if dones[0]:
                break

    def images(self) -> list[str]:
        """Return the frame before each step, and the last one, as data URIs; empty without frames."""
        frames = [] if self.frames is None else next(filter(None, self.frames.episodes), [])
        return [data_uri(frame) for frame in frames[: len(self.steps.steps) + 1]]


def _rendering_env(task: Task) -> gymnasium.Env | None:
    """Create the environment of a task with images; None with a warning if rendering fails."""
    env = task.make(IMAGES)
    try:
        check_rendering(env)
    except ValueError as error:
        env.close()
        reason = " ".join(str(error.__cause__ or error).split())
        warn_user(f"the page has no frames, because rendering fails: {reason}")
        return None
    return env
