"""Windows of consecutive steps of trajectories, in batches of tensors."""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from rlxf.data.sampling import UNIFORM_STEPS, EpisodeSampler, Sampling
from rlxf.data.splits import split_episodes
from rlxf.data.trajectories import Trajectories
from rlxf.utils.checks import check_int


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
        TypeError: if length or burn_in is not an int.
        ValueError: if length is less than 1, or burn_in less than 0.
    """

    def __init__(self, trajectories: Trajectories, length: int, burn_in: int = 0):
        for name, value, least in (("length", length, 1), ("burn_in", burn_in, 0)):
            check_int(name, value, least)
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

    def trimmed(self) -> Self:
        """Return these windows without the leading columns that are padding in every window of the data.

        A batch has ``min(burn_in + K, longest episode)`` columns. Use it if a model does not depend on
        padding, to save time where K exceeds all episodes.
        """
        windows = copy(self)
        windows._columns = self._columns[-int(self.trajectories.lengths.max()) :]
        return windows

    def split(self, fraction: float, seed: int) -> tuple[Self, Self]:
        """Split the episodes at random: return windows to train on, and windows of held-out episodes.

        Both draw uniformly from the steps of their part. Arguments and errors are those of
        `rlxf.data.splits.split_episodes`.
        """
        training, held_out = split_episodes(self.episodes, fraction, seed)
        return self.of_episodes(training), self.of_episodes(held_out)

    def with_sampling(self, sampling: Sampling) -> Self:
        """Return these windows with other probabilities of `draw`.

        Raises:
            ValueError: if the episodes do not suit the scheme, e.g. because all returns are equal, or its
                weights are invalid (`SamplingScheme.checked_weights`).
        """
        windows = copy(self)
        episodes = self.episodes
        data = self.trajectories
        windows._sampler = None
        if sampling == UNIFORM_STEPS:
            return windows
        lengths, returns = data.lengths[episodes], data.returns[episodes]
        weights = sampling.checked_weights(lengths, returns)
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
        the windows, step t of an episode has the weight min(t + 1, K): it is in as many windows. With
        burn-in, the K - 1 steps before the last one of an episode are in up to min(burn_in, K - 1) more,
        because burn-in fills the last K columns of shortened windows.
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
