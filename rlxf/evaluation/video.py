"""Episodes to look at while an agent learns."""

import gymnasium
import torch
from stable_baselines3.common.logger import Video

from rlxf.evaluation.episodes import SEED
from rlxf.evaluation.every_steps import EverySteps
from rlxf.evaluation.film import check_can_film, film
from rlxf.evaluation.gif import OTHERS, attach_gifs

FPS = 30
"""Pictures in a second, where the environment does not say."""


class VideoCallback(EverySteps):
    """Play and film an episode every so many steps, for TensorBoard's images: tag ``eval/video``.

    Every film is of the same episode (same seed), as far as the agent does the same. After 500 steps
    it ends. Observations are normalised as in training. Without TensorBoard nothing is played.

    Args:
        env: to play in, not one trained in; made with ``render_mode="rgb_array"``.
        every_steps: environment steps, over all environments, from one film to the next.
        deterministic: the most likely action instead of a sample.
        seed: of the environment.

    Raises:
        ValueError: if the environment gives no pictures, or every_steps is less than 1.
        TypeError: if it is no single Gymnasium environment.
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
        """Film an episode, to be written with the rollout's numbers."""
        if not attach_gifs(self.logger):
            return
        pictures = torch.from_numpy(film(self.model, self.env, self.seed, self.deterministic))
        video = Video(pictures.permute(0, 3, 1, 2)[None], self.env.metadata.get("render_fps") or FPS)
        self.logger.record("eval/video", video, exclude=OTHERS)
