"""Windows of K steps, gathered from flat arrays."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from rlxf.data.trajectories import Trajectories


@dataclass(frozen=True, eq=False)
class WindowBatch:
    """Batch of B windows of K steps. Shorter windows are padded with zeros on the left.

    Args:
        observations: float32 (B, K, D) or uint8 (B, K, C, H, W), not normalized.
        actions: Box float32 (B, K, A), Discrete int64 (B, K), MultiDiscrete and MultiBinary int64 (B, K, A).
        return_to_go: float32 (B, K), in units of the rewards.
        time_steps: int64 (B, K), counted from the start of the episode.
        mask: bool (B, K), True for steps, False for padding.
    """

    observations: Tensor
    actions: Tensor
    return_to_go: Tensor
    time_steps: Tensor
    mask: Tensor

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on another device."""
        return type(self)(*(getattr(self, field.name).to(device) for field in fields(self)))


class Windows:
    """Windows of at most K consecutive steps of one episode.

    `sample` draws the first step of each window uniformly from all steps, so an episode is drawn with a
    probability proportional to its length. A window ends after K steps or at the end of the episode, as in
    the reference implementation of Decision Transformer (Chen et al. 2021, arXiv:2106.01345). A short window
    is therefore always the end of an episode. The causal model learns to act with a short context from the
    first steps of every window.

    Args:
        trajectories: source of the steps.
        length: number of steps K, at least 1; may exceed the longest episode.
        burn_in: number of additional steps before the start, as far as the episode has them, which fill a
            model's memory. Windows then have burn_in + K columns; the last step is in the last column.

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

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> WindowBatch:
        """Sample ``batch_size`` windows with a CPU generator; None for torch's global generator."""
        return self.starting_at(self.draw(batch_size, generator))

    def draw(self, batch_size: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw the first steps of random windows, int64 (batch_size,), for `starting_at`."""
        return torch.randint(self.trajectories.steps, (batch_size,), generator=generator)

    def iterate_once(self, batch_size: int) -> Iterator[WindowBatch]:
        """Iterate over windows, in order, that contain each step exactly once, for example for evaluation.

        The last batch may be smaller. Burn-in steps are repeated in addition.
        """
        offsets = self.trajectories.offsets
        pairs = pairwise(offsets.tolist())
        starts = np.concatenate([np.arange(first, end, self.length) for first, end in pairs])
        for begin in range(0, len(starts), batch_size):
            yield self.starting_at(starts[begin : begin + batch_size])

    def starting_at(self, starts: ArrayLike) -> WindowBatch:
        """Return the windows whose first steps are ``starts`` (B,), indices into all N steps.

        Raises:
            IndexError: if a start is not in [0, N).
        """
        data, starts = self.trajectories, np.asarray(starts, np.int64)
        self._check(starts)
        episode = np.searchsorted(data.offsets, starts, side="right") - 1
        end = np.minimum(starts + self.length, data.offsets[episode + 1])
        first = np.maximum(starts - self.burn_in, data.offsets[episode])
        index = end[:, None] + self._columns
        mask = index >= first[:, None]
        return WindowBatch(
            observations=_gather(data.observations, index, mask),
            actions=_gather(data.actions, index, mask),
            return_to_go=_gather(data.return_to_go, index, mask),
            time_steps=torch.from_numpy((index - data.offsets[episode][:, None]) * mask),
            mask=torch.from_numpy(mask),
        )

    def _check(self, starts: NDArray[np.int64]) -> None:
        steps = self.trajectories.steps
        if len(starts) and not (starts.min() >= 0 and starts.max() < steps):
            raise IndexError(
                f"starts must be steps from 0 to {steps - 1}, got {starts.min()} to {starts.max()}"
            )


def _gather(array: NDArray[Any], index: NDArray[np.int64], mask: NDArray[np.bool_]) -> Tensor:
    """Gather rows ``array[index]`` (B, K, ...), and set them to zero where the mask is False."""
    rows = array.take(index, axis=0, mode="clip")  # indices of padding may be negative; values are unused
    rows[~mask] = 0
    return torch.from_numpy(rows)
