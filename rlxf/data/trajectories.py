"""Trajectories as flat arrays, windows of their steps, and normalization of observations."""

import hashlib
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from rlxf.data.encoders import ImageEncoder, VectorEncoder, observation_encoder
from rlxf.data.reference_scores import ReferenceScores
from rlxf.data.sampling import UNIFORM_STEPS, EpisodeSampler, Sampling
from rlxf.data.splits import split_episodes


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


@dataclass(frozen=True, eq=False, repr=False)
class Trajectories:
    """E episodes of N steps in total, concatenated in flat arrays, with their metadata.

    `load_trajectories` makes them from Minari datasets; the arrays are then read-only memory maps.
    ``dataclasses.replace`` replaces arrays; use `with_rewards` for rewards, which determine `return_to_go`.

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

    def __repr__(self) -> str:
        ids = self.dataset_ids
        sources = f"{len(ids)} datasets" if len(ids) > 1 else "".join(ids) or "no dataset id"
        return f"Trajectories({sources}: {self.episodes:,} episodes, {self.steps:,} steps)"

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

    def best_episodes(self, share: float) -> NDArray[np.int64]:
        """Return the numbers of the ``floor(share E)`` episodes with the highest returns, at least one.

        They are in ascending order, int64 (n,). Of episodes with equal returns, earlier ones are chosen.
        """
        count = count_best(share, self.episodes)
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

        It is `Standardize` with the mean and std over the steps, or `ScaleImages`. It is part of the model
        and saved with it.
        """
        if self.observation_mean is None or self.observation_std is None:
            return ScaleImages()
        return Standardize(self.observation_mean, self.observation_std)


def count_best(share: float, episodes: int) -> int:
    """Return ``floor(share E)`` of E episodes, at least 1."""
    return max(1, int(share * episodes + 1e-9))  # 0.29 * 100 is slightly less than 29


def return_to_go(rewards: ArrayLike) -> NDArray[np.float64]:
    """Compute ``R_t = r_t + r_(t+1) + ... + r_(T-1)`` for the rewards (T,) of an episode, in float64.

    There is no discount.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3.
    """
    return np.cumsum(np.asarray(rewards, np.float64)[::-1])[::-1]


@dataclass(frozen=True, eq=False)
class WindowBatch:
    """Batch of B windows of K steps. Shorter windows are padded with zeros on the left.

    Args:
        observations: float32 (B, K, D) or uint8 (B, K, C, H, W), not normalized.
        actions: Box float32 (B, K, A), Discrete int64 (B, K), MultiDiscrete and MultiBinary int64 (B, K, A).
        rewards: float32 (B, K).
        return_to_go: float32 (B, K), in units of the rewards.
        time_steps: int64 (B, K), counted from the start of the episode.
        mask: bool (B, K), True for steps, False for padding.
        terminated: bool (B,), True if the last step of the window led to a terminal state.
    """

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    return_to_go: Tensor
    time_steps: Tensor
    mask: Tensor
    terminated: Tensor

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on another device; the program does not wait for it."""
        columns = (getattr(self, field.name) for field in fields(self))
        return type(self)(*(column.to(device, non_blocking=True) for column in columns))

    def split(self, parts: int) -> list[Self]:
        """Split the windows into at most ``parts`` batches of nearly equal size, as views."""
        columns = (
            getattr(self, field.name).tensor_split(min(parts, len(self.mask))) for field in fields(self)
        )
        return [type(self)(*part) for part in zip(*columns, strict=True)]


class Windows:
    """Windows of at most K consecutive steps of one episode.

    `sample` draws the first step of each window uniformly from all steps, so an episode is drawn with a
    probability proportional to its length (`with_sampling` changes it). A window ends after K steps or at the
    end of the episode, as in the reference implementation of Decision Transformer (Chen et al. 2021,
    arXiv:2106.01345). A short window is therefore always the end of an episode. The causal model learns to
    act with a short context from the first steps of every window.

    Args:
        trajectories: source of the steps.
        length: number of steps K, at least 1; may exceed the longest episode.
        burn_in: number of additional steps before the start, as far as the episode has them, which fill a
            model's memory. Windows then have burn_in + K columns; the last step is in the last column. A
            window that the end of an episode shortens has burn-in in its last K columns, too, which is in the
            loss.

    Raises:
        ValueError: if length is less than 1, or burn_in less than 0.
    """

    def __init__(self, trajectories: Trajectories, length: int, burn_in: int = 0):
        for name, value, least in (("length", length, 1), ("burn_in", burn_in, 0)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.trajectories = trajectories
        self.length = length
        self.burn_in = burn_in
        self._columns = np.arange(-(burn_in + length), 0)
        self._episodes: NDArray[np.int64] | None = None
        self._drawable: NDArray[np.int64] | None = None
        self._sampler: EpisodeSampler | None = None

    @property
    def episodes(self) -> NDArray[np.int64]:
        """Numbers of the episodes that are used, int64 (n,)."""
        return np.arange(self.trajectories.episodes) if self._episodes is None else self._episodes

    def of_episodes(self, episodes: NDArray[np.int64]) -> Self:
        """Return windows of these episodes only, numbers int64 (n,), with equally likely steps."""
        windows = copy(self)
        windows._episodes = episodes
        windows._drawable = windows._possible_starts()
        windows._sampler = None
        return windows

    def split(self, share: float, seed: int) -> tuple[Self, Self]:
        """Split the episodes at random: return windows to train on, and windows of held-out episodes.

        Both draw uniformly from the steps of their part. Arguments and errors are those of
        `rlxf.data.splits.split_episodes`.
        """
        training, held_out = split_episodes(self.episodes, share, seed)
        return self.of_episodes(training), self.of_episodes(held_out)

    def with_sampling(self, sampling: Sampling) -> Self:
        """Return these windows with other probabilities of `draw`.

        Raises:
            ValueError: if the episodes do not suit the scheme, e.g. because all returns are equal.
        """
        windows = copy(self)
        episodes = self.episodes
        data = self.trajectories
        windows._sampler = None
        if sampling == UNIFORM_STEPS:
            return windows
        lengths, returns = data.lengths[episodes], data.returns[episodes]
        weights = sampling.episode_weights(lengths, returns)
        windows._sampler = self._sampler_of(episodes, weights)
        return windows

    def _sampler_of(self, episodes: NDArray[np.int64], weights: NDArray[np.float64]) -> EpisodeSampler:
        """Return a sampler of the first steps of windows, with weights of episodes, float64 (E,)."""
        data = self.trajectories
        return EpisodeSampler(data.offsets[episodes], data.lengths[episodes], weights)

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> WindowBatch:
        """Sample ``batch_size`` windows with a CPU generator; None for torch's global generator."""
        return self.starting_at(self.draw(batch_size, generator))

    def draw(self, batch_size: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw the first steps of random windows, int64 (batch_size,), for `starting_at`.

        Each step is equally likely, or has the probability of `with_sampling`. In a loss over all steps of
        the windows, step t of an episode has the weight min(t + 1, K): it is in as many windows.
        """
        if self._sampler is not None:
            return self._sampler.draw(batch_size, generator)
        if self._drawable is None:
            return torch.randint(self.trajectories.steps, (batch_size,), generator=generator)
        numbers = torch.randint(len(self._drawable), (batch_size,), generator=generator)
        return torch.from_numpy(self._drawable)[numbers]

    def iterate_once(self, batch_size: int) -> Iterator[WindowBatch]:
        """Iterate over windows, in order, that contain each step of the episodes exactly once.

        Use it for evaluation. The last batch may be smaller. Burn-in steps are repeated in addition.
        """
        starts = self._dividing_starts()
        for begin in range(0, len(starts), batch_size):
            yield self.starting_at(starts[begin : begin + batch_size])

    def _possible_starts(self) -> NDArray[np.int64]:
        """Return the steps of the episodes at which windows may start, int64 (n,): all steps."""
        return self.trajectories.steps_of(self.episodes)

    def _dividing_starts(self) -> NDArray[np.int64]:
        """Return the first steps of the windows that divide the episodes, int64 (n,), in order."""
        offsets = self.trajectories.offsets
        bounds = zip(offsets[self.episodes].tolist(), offsets[self.episodes + 1].tolist(), strict=True)
        return np.concatenate([np.arange(first, end, self.length) for first, end in bounds])

    def starting_at(self, starts: ArrayLike) -> WindowBatch:
        """Return the windows whose first steps are ``starts`` (B,), indices into all N steps.

        Raises:
            IndexError: if a start is not in [0, N).
        """
        data = self.trajectories
        starts = np.asarray(starts, np.int64)
        if len(starts) and not (starts.min() >= 0 and starts.max() < data.steps):
            raise IndexError(
                f"starts must be steps from 0 to {data.steps - 1}, got {starts.min()} to {starts.max()}"
            )
        episode = np.searchsorted(data.offsets, starts, side="right") - 1
        end = data.offsets[episode + 1]
        index, mask = self._select(starts, data.offsets[episode], end)
        at_end = np.where(mask, index, -1).max(axis=1, initial=-1) + 1 == end
        return WindowBatch(
            observations=_gather(data.observations, index, mask),
            actions=_gather(data.actions, index, mask),
            rewards=_gather(data.rewards, index, mask),
            return_to_go=_gather(data.return_to_go, index, mask),
            time_steps=torch.from_numpy((index - data.offsets[episode][:, None]) * mask),
            mask=torch.from_numpy(mask),
            terminated=torch.from_numpy(data.terminated[episode] & at_end),
        )

    def _select(
        self, starts: NDArray[np.int64], first: NDArray[np.int64], end: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the steps of each window, (B, W), and the mask of the columns that are no padding.

        Args:
            starts: first step of each window, (B,).
            first: first step of its episode, (B,).
            end: end of its episode (exclusive), (B,).
        """
        index = np.minimum(starts + self.length, end)[:, None] + self._columns
        return index, index >= np.maximum(starts - self.burn_in, first)[:, None]


class EpisodeWindows(Windows):
    """Windows that divide each episode: they begin at its steps 0, K, 2 K ..., after all earlier steps.

    Each step of the data is in exactly one window, and `sample` draws each window with the same probability,
    so all steps have the same weight in a loss. With another scheme of `with_sampling`, the weights are its
    probabilities of steps. All windows of a batch begin in the same column, at a time step divisible by K.
    The columns before it hold all earlier steps of the episode, on which a model's state at the start of the
    window depends. A batch has as many columns as its rows need, with padding on either side.

    Args:
        trajectories: source of the steps.
        length: number of steps K, at least 1; from the longest episode on, a window is a whole episode.

    Raises:
        ValueError: if length is less than 1.
    """

    def __init__(self, trajectories: Trajectories, length: int):
        super().__init__(trajectories, length)
        self._drawable = self._possible_starts()

    def _possible_starts(self) -> NDArray[np.int64]:
        """Return the first steps of the windows that divide the episodes."""
        return self._dividing_starts()

    def _sampler_of(self, episodes: NDArray[np.int64], weights: NDArray[np.float64]) -> EpisodeSampler:
        """Return a sampler of the first steps of windows, whose weights are those of a step each."""
        lengths = self.trajectories.lengths[episodes]
        counts = -(-lengths // self.length)
        return EpisodeSampler(
            self._dividing_starts(), np.ones(counts.sum(), np.int64), np.repeat(weights / lengths, counts)
        )

    def _select(
        self, starts: NDArray[np.int64], first: NDArray[np.int64], end: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the steps of the windows that contain the steps ``starts``; see `Windows`."""
        starts = starts - (starts - first) % self.length
        end = np.minimum(starts + self.length, end)
        before, after = (steps.max(initial=0) for steps in (starts - first, end - starts))
        index = starts[:, None] + np.arange(-before, after)
        return index, (index >= first[:, None]) & (index < end[:, None])


def _gather(array: NDArray[Any], index: NDArray[np.int64], mask: NDArray[np.bool_]) -> Tensor:
    """Gather rows ``array[index]`` (B, K, ...), and set them to zero where the mask is False."""
    rows = array.take(index, axis=0, mode="clip")  # indices of padding may be negative; values are unused
    rows[~mask] = 0
    return torch.from_numpy(rows)
