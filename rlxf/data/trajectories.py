"""Trajectories as flat arrays, and the normalization layers of their observations."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from rlxf.data.encoders import ImageEncoder, VectorEncoder, observation_encoder
from rlxf.data.reference_scores import ReferenceScores


class Standardize(nn.Module):
    """Standardization ``(x - mean) / std`` of vector observations.

    Mean and std are buffers: they are saved with the model and move to its device.

    Args:
        mean: (D,).
        std: (D,), nonzero.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: ArrayLike, std: ArrayLike):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, observations: Tensor) -> Tensor:
        """Standardize observations (..., D)."""
        return (observations - self.mean) / self.std


class ScaleImages(nn.Module):
    """Scaling ``x / 255`` of images: uint8 -> float32 in [0, 1]."""

    def forward(self, observations: Tensor) -> Tensor:
        """Scale images (..., C, H, W)."""
        return observations / 255


@dataclass(frozen=True, eq=False)
class Trajectories:
    """E episodes of N steps in total, concatenated in flat arrays, with their metadata.

    `load_trajectories` makes them from Minari datasets; the arrays are then read-only memory maps.
    ``dataclasses.replace`` replaces arrays.

    A step is an observation, the action taken after it, and the reward of that action. The observation after
    the last action of an episode is not kept, since return-conditioned training does not use it.

    Args:
        observations: vectors float32 (N, D) or images uint8 (N, C, H, W), depending on the space
            (`observation_encoder`). They are not normalized.
        actions: Box float32 (N, A), Discrete int64 (N,), MultiDiscrete and MultiBinary int64 (N, A). Discrete
            values are counted from 0, whatever the start of the space.
        rewards: float32 (N,).
        return_to_go: float32 (N,), sum of the rewards from each step to the end of its episode, without
            discount; summed in float64.
        offsets: int64 (E + 1,): episode e has the steps ``offsets[e]`` to ``offsets[e + 1]`` (exclusive).
        terminated: bool (E,), True if the last step of the episode led to a terminal state.
        truncated: bool (E,), True if the episode was truncated at its last step.
        observation_mean: float32 (D,), mean over the steps; None for images.
        observation_std: float32 (D,), population standard deviation, 1 for constant features; None for
            images.
        observation_space: observation space of the dataset, before encoding.
        action_space: action space of the dataset.
        env_spec: spec of the recorded environment; None if it is unknown or differs between joined datasets.
        eval_env_spec: spec of the evaluation environment that the dataset names, else env_spec.
        dataset_ids: Minari ids, one for each dataset.
        metadata: metadata of Minari, one for each dataset.
        reference_scores: scores for the normalization of returns; None if there are none, or they differ
            between joined datasets.
        lossy_images: True if images are stored as JPEG and therefore differ slightly from the environment's.
    """

    observations: NDArray[Any]
    actions: NDArray[Any]
    rewards: NDArray[np.float32]
    return_to_go: NDArray[np.float32]
    offsets: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    observation_mean: NDArray[np.float32] | None
    observation_std: NDArray[np.float32] | None
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    env_spec: EnvSpec | None = None
    eval_env_spec: EnvSpec | None = None
    dataset_ids: tuple[str, ...] = ()
    metadata: tuple[dict[str, Any], ...] = ()
    reference_scores: ReferenceScores | None = None
    lossy_images: bool = False

    @property
    def steps(self) -> int:
        """Total number of steps N."""
        return len(self.rewards)

    @property
    def episodes(self) -> int:
        """Number of episodes E."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of steps of each episode, int64 (E,)."""
        return np.diff(self.offsets)

    @property
    def returns(self) -> NDArray[np.float32]:
        """Return (sum of the rewards) of each episode, float32 (E,)."""
        return self.return_to_go[self.offsets[:-1]]

    @property
    def encoder(self) -> VectorEncoder | ImageEncoder:
        """Encoder of observations as rows."""
        return observation_encoder(self.observation_space)

    def normalization(self) -> nn.Module:
        """Create the normalization layer of observations (..., D) or (..., C, H, W).

        It is `Standardize` with the mean and std over the steps, or `ScaleImages`. It is part of the model
        and saved with it.
        """
        if self.observation_mean is None or self.observation_std is None:
            return ScaleImages()
        return Standardize(self.observation_mean, self.observation_std)
