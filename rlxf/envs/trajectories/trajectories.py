"""Whole episodes as flat arrays."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray
from torch import nn

from rlxf.envs.trajectories.encoders import ImageEncoder, VectorEncoder, observation_encoder
from rlxf.envs.trajectories.normalization import ScaleImages, Standardize
from rlxf.envs.trajectories.reference_scores import ReferenceScores


@dataclass(frozen=True, eq=False)
class Trajectories:
    """E episodes of N steps in all, one after the other in flat arrays, and what is known about them.

    `load_trajectories` makes them from Minari datasets; the arrays are then read-only and memory-mapped.
    ``dataclasses.replace`` gives the same with other arrays.

    A step is an observation, the action taken on it and the reward for that. The observation after the last
    action of an episode is not kept: nothing that is learned from whole returns reads it.

    Args:
        observations: vectors float32 (N, D) or images uint8 (N, C, H, W), as the space says
            (`observation_encoder`). Not normalised.
        actions: Box float32 (N, A), Discrete int64 (N,), MultiDiscrete and MultiBinary int64 (N, A). Choices
            count from 0, whatever the space counts from.
        rewards: float32 (N,).
        return_to_go: float32 (N,), sum of the rewards from each step to the end of its episode, without
            discount; summed in float64.
        offsets: int64 (E + 1,): episode e is the steps ``offsets[e]`` to ``offsets[e + 1]``.
        terminated: bool (E,), whether the last step of the episode ended in a terminal state.
        truncated: bool (E,), whether it was cut off there.
        observation_mean: float32 (D,), mean over the steps; None for images.
        observation_std: float32 (D,), population standard deviation, 1 for constant features; None for
            images.
        observation_space: of the dataset, before encoding.
        action_space: of the dataset.
        env_spec: environment that the data come from; None if the dataset does not say, or joined datasets
            do not agree.
        eval_env_spec: environment to evaluate in; the dataset's own choice, else env_spec.
        dataset_ids: Minari ids, one for each dataset joined.
        metadata: of Minari, one for each dataset joined.
        reference_scores: to normalise returns with; None if there are none, or joined datasets do not agree.
        lossy_images: whether the images went through JPEG, so that what is learned from differs a little
            from what the environment shows.
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
        """N"""
        return len(self.rewards)

    @property
    def episodes(self) -> int:
        """E"""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 (E,): steps of each episode."""
        return np.diff(self.offsets)

    @property
    def returns(self) -> NDArray[np.float32]:
        """float32 (E,): sum of the rewards of each episode."""
        return self.return_to_go[self.offsets[:-1]]

    @property
    def encoder(self) -> VectorEncoder | ImageEncoder:
        """What turned observations of the space into rows, to do the same while acting."""
        return observation_encoder(self.observation_space)

    def normalization(self) -> nn.Module:
        """A new layer that brings raw observations (..., D) or (..., C, H, W) to one scale.

        `Standardize` with the mean and std over the steps, or `ScaleImages`. As part of the model it is saved
        with it, and is the same when learning and when acting.
        """
        if self.observation_mean is None or self.observation_std is None:
            return ScaleImages()
        return Standardize(self.observation_mean, self.observation_std)
