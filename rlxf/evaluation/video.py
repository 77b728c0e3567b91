"""Callback that records videos of episodes during training."""

import gymnasium
import torch
from stable_baselines3.common.logger import Video

from rlxf.evaluation.episodes import SEED
from rlxf.evaluation.every_steps import EverySteps
from rlxf.evaluation.film import check_can_film, film
from rlxf.evaluation.gif import OTHERS, attach_gifs

FPS = 30
"""Frames per second, if the environment does not specify them."""


class VideoCallback(EverySteps):
    """Record a video of an episode at regular intervals for TensorBoard's images, with tag ``eval/video``.

    All videos use the same seed and end after at most 500 steps. Observations are normalised as in training.
    Without TensorBoard, no episode is played.

    Args:
        env: environment created with ``render_mode="rgb_array"``; not the training environment.
        every_steps: interval between videos, in environment steps over all environments.
        deterministic: use the most likely action instead of a sample.
        seed: seed of the environment.

    Raises:
        ValueError: if the environment renders no images, or every_steps is less than 1.
        TypeError: if env is not a single Gymnasium environment.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        every_steps: int = 50_000,
        *,
        deterministic: bool = True,
        seed: int | None = SEED,
    ):
        super().__init__(every_steps)
        check_can_film(env)
        self.env = env
        self.deterministic = deterministic
        self.seed = seed

    def act(self) -> None:
        """Record an episode, which the logger writes with the scalars of the rollout."""
        if not attach_gifs(self.logger):
            return
        frames = torch.from_numpy(film(self.model, self.env, self.seed, self.deterministic))
        video = Video(frames.permute(0, 3, 1, 2)[None], self.env.metadata.get("render_fps") or FPS)
        self.logger.record("eval/video", video, exclude=OTHERS)
