"""Trajectories as flat arrays: returns-to-go, statistics and normalization of observations."""

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


def return_to_go(rewards: ArrayLike) -> NDArray[np.float64]:
    """Compute ``R_t = r_t + r_(t+1) + ... + r_(T-1)`` for the rewards (T,) of an episode, in float64.

    There is no discount.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3.
    """
    return np.cumsum(np.asarray(rewards, np.float64)[::-1])[::-1]


SMALLEST_STD = 1e-6


class RunningStats:
    """Running mean and population standard deviation per column, in float64.

    Pieces are combined by ``M2 = M2_a + M2_b + (mean_b - mean_a)^2 n_a n_b / (n_a + n_b)``, where M2 is the
    sum of squared deviations from the mean. Columns far from zero therefore lose no precision.

    Source: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance".

    Args:
        columns: number of columns D.
    """

    def __init__(self, columns: int):
        self._count = 0
        self._mean = np.zeros(columns)
        self._squares = np.zeros(columns)

    def add(self, rows: NDArray[np.floating]) -> None:
        """Add rows (n, D), n at least 1."""
        rows = rows.astype(np.float64)
        count, mean = len(rows), rows.mean(axis=0)
        total = self._count + count
        shift = mean - self._mean
        self._squares += ((rows - mean) ** 2).sum(axis=0) + shift**2 * (self._count * count / total)
        self._mean += shift * (count / total)
        self._count = total

    @property
    def mean(self) -> NDArray[np.float32]:
        """Mean of the columns, (D,)."""
        return self._mean.astype(np.float32)

    @property
    def std(self) -> NDArray[np.float32]:
        """Population standard deviation of the columns, (D,); 1 for constant columns (below 1e-6).

        The reference implementation of Decision Transformer adds 1e-6 instead, which scales any deviation
        from a constant by a million.
        """
        std = np.sqrt(self._squares / self._count)
        return np.where(std < SMALLEST_STD, 1.0, std).astype(np.float32)
