"""Videos of episodes: recording of frames, GIF files, and the callback that writes them."""

import math
import os
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from stable_baselines3.common.logger import KVWriter, Logger, Video
from stable_baselines3.common.type_aliases import PolicyPredictor
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter

from rlxf.envs.gym_api import reset_env
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.evaluation.agents import is_return_conditioned_agent
from rlxf.evaluation.environment import check_not_trained_in, prepared_env
from rlxf.evaluation.episodes import DEFAULT_SEED, check_return_conditioned
from rlxf.evaluation.periodic import PeriodicCallback
from rlxf.evaluation.rollout import play
from rlxf.utils.checks import check_finite_number
from rlxf.utils.gif import encode_gif, video_frames
from rlxf.utils.rng import preserve_rng_state
from rlxf.utils.tensorboard import writers, writes_tensorboard

DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
DRIVER = "SDL_VIDEODRIVER"


def draw_off_screen() -> None:
    """Set SDL's dummy video driver for this process, on a Linux machine without a display.

    Otherwise SDL, which renders Gymnasium's classic control and Box2D environments, looks for a display and
    prints that XDG_RUNTIME_DIR is not set. A driver in ``SDL_VIDEODRIVER`` takes precedence. Call this
    function before the first image is rendered.
    """
    if sys.platform == "linux" and not any(os.environ.get(name) for name in DISPLAYS):
        os.environ.setdefault(DRIVER, "dummy")


class GifOutputFormat(KVWriter):
    """Output format of SB3's logger that writes each `Video` as an animated GIF.

    Args:
        writer: TensorBoard writer.
    """

    def __init__(self, writer: SummaryWriter):
        self.writer = writer

    def write(
        self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0
    ) -> None:
        """Write the videos among the values, and ignore all other values."""
        assert self.writer.file_writer is not None
        for tag, value in key_values.items():
            if isinstance(value, Video):
                summary = gif_summary(tag, video_frames(value), value.fps)
                self.writer.file_writer.add_summary(summary, step)
        self.writer.flush()

    def close(self) -> None:
        """Do nothing, because SB3's TensorBoard format closes the writer."""


def attach_gifs(logger: Logger) -> bool:
    """Make the logger write videos as GIFs; return False if it writes no TensorBoard events.

    SB3's TensorBoard format, which must be excluded, needs moviepy for videos, which requires an old Pillow.
    """
    outputs = logger.output_formats
    if not any(isinstance(output, GifOutputFormat) for output in outputs):
        outputs.extend(map(GifOutputFormat, writers(logger)))
    return writes_tensorboard(logger)


def gif_summary(tag: str, pictures: NDArray[np.uint8], fps: float) -> Summary:
    """Return T frames, (T, H, W, 3), as one TensorBoard image."""
    _, height, width, channels = pictures.shape
    image = Summary.Image(
        height=height, width=width, colorspace=channels, encoded_image_string=encode_gif(pictures, fps)
    )
    return Summary(value=[Summary.Value(tag=tag, image=image)])


RENDER_MODE = "rgb_array"
MAX_STEPS = 500
"""Maximum number of recorded steps of an episode."""
MAX_FRAME_SIZE = 320
"""Maximum height and width of a frame in pixels.

Larger frames are reduced and smaller ones enlarged by an integer factor.
"""


class FrameRecorder(gymnasium.Wrapper):
    """Wrapper that records a frame of each state, including the last state before a ``VecEnv`` resets.

    It renders off screen on machines without a display (`draw_off_screen`).

    Args:
        env: environment created with ``render_mode="rgb_array"``.
        limit: maximum number of frames; later states are not rendered. None for no limit.

    Attributes:
        episodes: frames of each episode, uint8 (H, W, 3).
    """

    def __init__(self, env: gymnasium.Env, limit: int | None = None):
        super().__init__(env)
        draw_off_screen()
        self.limit = limit
        self.episodes: list[list[NDArray[np.uint8]]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the environment and start the frames of a new episode."""
        result = reset_env(self.env, seed, options)
        self.episodes.append([])
        self._record()
        return result

    def step(self, action: Any) -> Any:
        """Step the environment and record a frame."""
        result = super().step(action)
        self._record()
        return result

    def frames(self, episodes: int) -> NDArray[np.uint8]:
        """Return the frames of the first episodes, uint8 (T, H, W, 3)."""
        return np.stack([frame for episode in self.episodes[:episodes] for frame in episode])

    def _record(self) -> None:
        if self.limit is None or sum(map(len, self.episodes)) < self.limit:
            self.episodes[-1].append(self._frame())

    def _frame(self) -> NDArray[np.uint8]:
        frame = np.asarray(self.render())
        size = max(frame.shape[:2])
        if size > MAX_FRAME_SIZE:
            return np.asarray(Image.fromarray(frame).reduce(math.ceil(size / MAX_FRAME_SIZE)))
        return frame.repeat(MAX_FRAME_SIZE // size, axis=0).repeat(MAX_FRAME_SIZE // size, axis=1)


def record_frames(
    agent: PolicyPredictor,
    env: gymnasium.Env,
    seed: int | None,
    deterministic: bool,
    on_step: Callable[[], object] | None = None,
    target_return: float | None = None,
) -> NDArray[np.uint8]:
    """Play an episode, at most 500 steps, and return its T frames, uint8 (T, H, W, 3).

    Args:
        agent: object with SB3's ``predict``; observations are normalized as in its training.
        env: environment created with ``render_mode="rgb_array"``; it stays open.
        seed: seed of the episode.
        deterministic: use the most likely action instead of a sample.
        on_step: function that is called before each step; an exception that it raises ends the episode.
        target_return: target return of the agent; None for an agent that is not conditioned on a return.
    """
    filmed = FrameRecorder(env)
    with prepared_env(agent, filmed, 1, seed) as vec_env:
        if target_return is not None:
            vec_env = ReturnToGo(vec_env, target_return)
        for _, dones, _ in islice(play(agent, vec_env, deterministic, on_step=on_step), MAX_STEPS):
            if dones[0]:
                break
    return np.stack(filmed.episodes[0])


def check_rendering(env: gymnasium.Env) -> None:
    """Raise unless the environment renders images. The check resets the environment.

    Raises:
        TypeError: if env is not a single Gymnasium environment.
        ValueError: if env was created without ``render_mode="rgb_array"``, or rendering fails.
    """
    if not isinstance(env, gymnasium.Env):
        raise TypeError(f"a video needs one gymnasium.Env with render_mode='rgb_array', got {env!r}")
    if env.render_mode != RENDER_MODE:
        supported = env.metadata.get("render_modes", [])
        possible = RENDER_MODE in supported
        advice = f"create it with render_mode={RENDER_MODE!r}" if possible else "it cannot be recorded"
        raise ValueError(f"{env} has render_mode={env.render_mode!r} and supports {supported}: {advice}")
    try:
        FrameRecorder(env).reset()
    except Exception as error:  # missing drivers, displays and packages raise various exceptions
        raise ValueError(f"{env} cannot be rendered: {error!r}; correct it, or record no video") from error


FPS = 30
"""Frames per second, if the environment does not specify them."""


class VideoCallback(PeriodicCallback):
    """Record a video of an episode at regular intervals for TensorBoard's images, with tag ``eval/video``.

    All videos use the same seed and end after at most 500 steps. Observations are normalized as in training.
    Without TensorBoard, no episode is played. A frame costs about as much time as ten training steps.

    Args:
        env: environment created with ``render_mode="rgb_array"``; not the training environment.
        every_steps: interval between videos, in environment steps over all environments; in updates for an
            agent that learns offline.
        deterministic: use the most likely action instead of a sample.
        seed: seed of the environment.
        budget: see `PeriodicCallback`; None for a video at every interval.
        target_return: target return of the agent; None for an agent that is not conditioned on a return.
        episode_length: expected number of steps of an episode, for an agent that has no training episodes.

    Raises:
        ValueError: if the environment renders no images, or a number is out of range; before training
            starts, if the agent trains in ``env``, or ``target_return`` is passed for an agent that is not
            conditioned on a return.
        TypeError: if env is not a single Gymnasium environment, or a number has another type; before training
            starts, if an agent that is conditioned on a return gets no target.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        every_steps: int = 50_000,
        *,
        deterministic: bool = True,
        seed: int | None = DEFAULT_SEED,
        budget: float | None = None,
        target_return: float | None = None,
        episode_length: float = 0.0,
    ):
        super().__init__(every_steps, budget)
        check_rendering(env)
        if target_return is not None:
            check_finite_number("target_return", target_return)
        self.env = env
        self.deterministic = deterministic
        self.seed = seed
        self.target_return, self.episode_length = target_return, episode_length

    def _on_training_start(self) -> None:
        super()._on_training_start()
        example = f"gymnasium.make(id, render_mode={RENDER_MODE!r})"
        check_not_trained_in(self.model, self.env, "VideoCallback", example)
        if self.target_return is not None:
            check_return_conditioned(self.model, "target_return")
        elif is_return_conditioned_agent(self.model):
            name = type(self.model).__name__
            raise TypeError(f"{name} is conditioned on a return: pass target_return to VideoCallback")

    def expected_steps(self) -> float:
        """Return the mean length of the last training episodes, or the expected length, at most 500."""
        return min(self._training_length or self.episode_length, MAX_STEPS)

    def on_interval(self) -> int:
        """Record an episode and write it."""
        if not attach_gifs(self.logger):
            return 0
        with preserve_rng_state():
            frames = record_frames(
                self.model, self.env, self.seed, self.deterministic, self.on_env_step, self.target_return
            )
        video = torch.from_numpy(frames).permute(0, 3, 1, 2)[None]
        fps = self.env.metadata.get("render_fps") or FPS
        self.write_picture("eval/video", Video(video, fps), exclude=("tensorboard",))
        return len(frames) - 1
