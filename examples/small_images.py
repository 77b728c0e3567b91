"""Your own features extractor: images that are too small for the default one.

`CnnGTrXLPolicy` reads images with the NatureCNN of Stable-Baselines3, which needs 36 x 36 pixels. Here the
task of signal_task.py shows pictures of 8 x 8 pixels, and a smaller network reads them.

    python small_images.py
"""

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.wrappers import TransformObservation
from signal_task import SMALL, TASK
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

from rlxf import GTrXLPPO, evaluate
from rlxf.envs import make_vec_env
from rlxf.evaluation import Report

SIDE = 8


def draw(observation: np.ndarray) -> np.ndarray:
    """Return a picture: a column of two pixels for each of the four numbers that is 1."""
    picture = np.zeros((SIDE, SIDE, 1), np.uint8)  # (height, width, channels), 0 to 255
    picture[:, :, 0] = 255 * observation.astype(np.uint8).repeat(SIDE // len(observation))
    return picture


def with_pictures(env: gymnasium.Env) -> gymnasium.Env:
    """Return the environment with pictures as observations."""
    return TransformObservation(env, draw, Box(0, 255, (SIDE, SIDE, 1), np.uint8))


class SmallCNN(BaseFeaturesExtractor):
    """Two convolutions for images of at least 8 x 8 pixels.

    The policy divides pixels by 255 and moves channels to the front, as in Stable-Baselines3: `forward` gets
    (batch, channels, height, width) in float32. It returns the features of one token for each step.
    """

    def __init__(self, observation_space: Box, features_dim: int = 32):
        super().__init__(observation_space, features_dim)
        self.convolutions = nn.Sequential(
            nn.Conv2d(observation_space.shape[0], 8, kernel_size=3, stride=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, kernel_size=3),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():  # the number of inputs of the last layer depends on the size of the images
            inputs = self.convolutions(torch.zeros(1, *observation_space.shape)).shape[1]
        self.last = nn.Sequential(nn.Linear(inputs, features_dim), nn.ReLU())

    def forward(self, observations: Tensor) -> Tensor:
        return self.last(self.convolutions(observations))


def train(steps: int = 20_480, seed: int = 0) -> tuple[GTrXLPPO, Report]:
    """Return a trained agent and its evaluation."""
    env = make_vec_env(TASK, n_envs=32, seed=seed, wrapper_class=with_pictures)
    agent = GTrXLPPO(
        "CnnGTrXLPolicy",
        env,
        policy_kwargs={
            "features_extractor_class": SmallCNN,
            "features_extractor_kwargs": {"features_dim": 64},
        },
        seed=seed,
        **SMALL,
    )
    agent.learn(steps, progress_bar=True)
    return agent, evaluate(agent, env, episodes=200)


def main() -> None:
    """Train an agent, save it, and load it again."""
    agent, report = train()
    print(report)
    agent.save("small_images.zip")
    # A checkpoint does not hold classes: pass the features extractor again.
    loaded = GTrXLPPO.load("small_images.zip", policy_kwargs=agent.policy_kwargs)
    print("loaded:", type(loaded.policy.features_extractor).__name__)


if __name__ == "__main__":
    main()
