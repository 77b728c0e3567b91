"""Trajectories as flat arrays, and normalization of observations."""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from rlxf.data.encoders import ImageEncoder, VectorEncoder, has_image_extractor, observation_encoder
from rlxf.data.reference_scores import ReferenceScores
from rlxf.data.running_stats import observation_moments


class Standardize(nn.Module):
    """Standardization ``(x - mean) / std`` of vectors, and of images too small for a convolution.

    Mean and std are buffers: they are saved with the model and move to its device.

    Args:
        mean: (D,) or (C, H, W).
        std: of the same shape, nonzero.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: ArrayLike, std: ArrayLike):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, observations: Tensor) -> Tensor:
        """Standardize observations (..., D) or uint8 (..., C, H, W)."""
        return (observations - self.mean) / self.std


class ScaleImages(nn.Module):
    """Scaling ``x / 255`` of images: uint8 -> float32 in [0, 1]."""

    def forward(self, observations: Tensor) -> Tensor:
        """Scale images (..., C, H, W)."""
        return observations / 255


def default_normalization(encoder: VectorEncoder | ImageEncoder) -> nn.Module:
    """Create the normalization layer for data without statistics: images are divided by 255.

    It has the type and the shapes of a layer with statistics.

    Args:
        encoder: encoder of the observations.
    """
    shape = encoder.shape
    if has_image_extractor(shape):
        return ScaleImages()
    scale = 255.0 if isinstance(encoder, ImageEncoder) else 1.0
    return Standardize(np.zeros(shape, np.float32), np.full(shape, scale, np.float32))


@dataclass(frozen=True, eq=False, repr=False)
class Trajectories:
    """E episodes of N steps in total, concatenated in flat arrays, with their metadata.

    `load_trajectories` makes them from Minari datasets; the arrays are then read-only memory maps.
    ``dataclasses.replace`` replaces arrays; use `with_rewards` for rewards, which determine `return_to_go`,
    and `with_observations` for observations, which determine their mean and standard deviation.

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
        observation_mean: float32 (D,), mean over the steps; (C, H, W) for images below 36 x 36 pixels, None
            for larger images.
        observation_std: population standard deviation, of the same shape or None. It is 1 for constant
            features of vectors and 255 for constant values of images; see
            `rlxf.data.running_stats.RunningStats.constant`. For other values of images, it is at least 1/16
            of the largest value of all images.
        observation_space: observation space of the dataset, before encoding.
        action_space: action space of the dataset.
        env_spec: spec of the recorded environment; None if it is unknown or differs between joined datasets.
        eval_env_spec: spec of the evaluation environment that the dataset names, else env_spec.
        env_ids: different Gymnasium ids of the recorded environments; empty if no dataset names one.
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
    env_ids: tuple[str, ...] = ()
    dataset_ids: tuple[str, ...] = ()
    metadata: tuple[dict[str, Any], ...] = ()
    reference_scores: ReferenceScores | None = None
    lossy_images: bool = False
    _loaded: bool = field(default=False, init=False)  # set by load_trajectories, reset by replace

    def __repr__(self) -> str:
        ids = self.dataset_ids
        sources = f"{len(ids)} datasets" if len(ids) > 1 else "".join(ids) or "no dataset id"
        return f"Trajectories({sources}: {self.episodes:,} episodes, {self.steps:,} steps)"

    @property
    def loaded(self) -> bool:
        """True for unchanged results of `load_trajectories`, whose arrays the conversion has validated.

        It is False if an array is writable, as those of deep copies and of unpickled trajectories are.
        """
        return self._loaded and not any(
            isinstance(array, np.ndarray) and array.flags.writeable for array in vars(self).values()
        )

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
        return self.return_to_go[self.offsets[:-1]] + np.float32(0)  # 0 in place of -0

    def best_episodes(self, fraction: float) -> NDArray[np.int64]:
        """Return the numbers of the ``floor(fraction E)`` episodes with the highest returns, at least one.

        They are in ascending order, int64 (n,). Of episodes with equal returns, earlier ones are chosen.
        """
        count = count_best(fraction, self.episodes)
        return np.sort(np.argsort(-self.returns, kind="stable")[:count])

    def steps_of(self, episodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of all steps of these episodes, in their order, int64 (n,)."""
        return np.concatenate([np.arange(self.offsets[e], self.offsets[e + 1]) for e in episodes])

    def with_rewards(self, rewards: ArrayLike) -> Self:
        """Return these trajectories with other rewards (N,), and the returns-to-go of these rewards.

        Raises:
            ValueError: if the shape is not (N,).
        """
        values = np.asarray(rewards, np.float64)
        if values.shape != (self.steps,):
            raise ValueError(f"rewards must have the shape ({self.steps},), got {values.shape}")
        sums = [return_to_go(episode) for episode in np.split(values, self.offsets[1:-1])]
        returns = np.concatenate(sums).astype(np.float32)
        return replace(self, rewards=values.astype(np.float32), return_to_go=returns)

    def with_observations(self, observations: ArrayLike) -> Self:
        """Return these trajectories with other observations, and the mean and the std of these observations.

        Args:
            observations: vectors (N, D) or images uint8 (N, C, H, W), in the encoding of
                ``observation_space``, not normalized; other numbers than float32 are converted. If their
                width changes, replace the space first, ``dataclasses.replace(data, observation_space=...)``.

        Raises:
            ValueError: if the shape differs, or images are not uint8.
        """
        rows, shape = np.asarray(observations), (self.steps, *self.encoder.shape)
        casting: Literal["no", "same_kind"] = "no" if isinstance(self.encoder, ImageEncoder) else "same_kind"
        if rows.shape != shape or not np.can_cast(rows.dtype, self.encoder.dtype, casting):
            raise ValueError(
                f"observations must be {np.dtype(self.encoder.dtype)} of shape {shape}, in the encoding of "
                f"{self.observation_space}, got {rows.dtype} of shape {rows.shape}"
            )
        rows = rows.astype(self.encoder.dtype, copy=False)
        mean, std = observation_moments(self.encoder, rows)
        return replace(self, observations=rows, observation_mean=mean, observation_std=std)

    def fingerprint(self) -> str:
        """Return a digest of the arrays, as 16 characters; of observations, that of at most 1,000 rows."""
        rows = np.linspace(0, self.steps - 1, min(self.steps, 1000), dtype=np.int64)
        arrays = self.offsets, self.actions, self.rewards, self.return_to_go, self.terminated, self.truncated
        digest = hashlib.blake2b(digest_size=8)
        for array in (*arrays, self.observations[rows]):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @property
    def complete_transitions(self) -> NDArray[np.bool_]:
        """Steps whose next observation is known or not needed, bool (N,).

        They are all steps except the last step of episodes that are not terminated.
        """
        complete = np.ones(self.steps, np.bool_)
        complete[self.offsets[1:][~self.terminated] - 1] = False
        return complete

    @property
    def encoder(self) -> VectorEncoder | ImageEncoder:
        """Encoder of observations as rows."""
        return observation_encoder(self.observation_space)

    def normalization(self) -> nn.Module:
        """Create the normalization layer of observations (..., D) or (..., C, H, W).

        It is `Standardize` with the mean and std over the steps, or `ScaleImages` for images of at least 36
        x 36 pixels. It is part of the model and saved with it. Without statistics, see
        `default_normalization`.
        """
        large = has_image_extractor(self.encoder.shape)
        if large or self.observation_mean is None or self.observation_std is None:
            return default_normalization(self.encoder)
        return Standardize(self.observation_mean, self.observation_std)


def count_best(fraction: float, episodes: int) -> int:
    """Return ``floor(fraction E)`` of E episodes, at least 1."""
    return max(1, int(fraction * episodes + 1e-9))  # 0.29 * 100 is slightly less than 29


def return_to_go(rewards: ArrayLike) -> NDArray[np.float64]:
    """Compute ``R_t = r_t + r_(t+1) + ... + r_(T-1)`` for the rewards (T,) of an episode, in float64.

    There is no discount.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3.
    """
    return np.cumsum(np.asarray(rewards, np.float64)[::-1])[::-1]
