"""Statistics of the observations, rewards and actions of all steps of a dataset, computed piece by piece."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlxf.data.conversion import PIECE_BYTES
from rlxf.data.running_stats import RunningStats
from rlxf.data.spaces import discrete_sizes, discrete_start

COUNTED_VALUES = 4096
"""Maximum number of discrete actions that are counted, over all components."""
SHOWN_VALUES = 8
"""Maximum number of discrete actions whose frequencies are shown."""
MEDIAN_SAMPLE = 2**20
"""Approximate number of rewards of which the median is computed."""
NEARLY_ALL = 0.95
"""Fraction of equal rewards from which on rewards are nearly constant."""
NARROW_FRACTION = 0.05
"""Fraction of the range between the bounds below which the actions of a component are narrow."""


def nearly_constant_features(observations: NDArray[Any], std: NDArray[np.float32] | None) -> list[int]:
    """Return the features of vectors that vary, but by no more than the rounding of float32.

    `rlxf.data.running_stats.RunningStats.constant` defines the limit; features without any variation are left
    out. Only features with a standard deviation of 1 are read, which is that of constant ones.

    Args:
        observations: vectors (N, D), or images (N, C, H, W), which have none.
        std: `rlxf.data.Trajectories.observation_std`.
    """
    if observations.ndim != 2 or std is None:
        return []
    features = np.flatnonzero(std == 1)
    stats = RunningStats(len(features))
    varying = np.zeros(len(features), np.bool_)
    for piece in pieces(observations) if len(features) else ():
        values = piece[:, features]
        stats.update(values.astype(np.float64))
        varying |= (values != observations[0, features]).any(axis=0)
    return features[stats.constant & varying].tolist()


@dataclass(frozen=True)
class RewardStatistics:
    """Statistics of the rewards of all steps.

    Args:
        minimum: smallest reward.
        maximum: largest reward.
        mean: mean reward.
        common: most frequent of the values 0, ``minimum``, ``maximum`` and the median, which is that of a
            sample if there are many steps. A reward of more than half of the steps usually is the median.
        common_fraction: fraction of the steps with the reward ``common``, from 0 to 1.
    """

    minimum: float
    maximum: float
    mean: float
    common: float
    common_fraction: float

    @classmethod
    def of(cls, rewards: NDArray[np.float32]) -> "RewardStatistics":
        """Compute the statistics of rewards (N,)."""
        low, high = float(rewards.min()), float(rewards.max())
        sample = rewards[:: max(1, len(rewards) // MEDIAN_SAMPLE)]
        median = np.partition(sample, len(sample) // 2)[len(sample) // 2]
        values = np.array([0.0, low, high, median], np.float32)
        counts = np.zeros(len(values), np.int64)
        total = 0.0
        for piece in pieces(rewards):
            counts += (piece[:, None] == values).sum(axis=0)
            total += float(piece.sum(dtype=np.float64))
        most = int(np.argmax(counts))
        steps = len(rewards)
        return cls(low, high, total / steps, float(values[most]), float(counts[most] / steps))

    @property
    def constant(self) -> bool:
        """True if all rewards are equal."""
        return self.minimum == self.maximum

    @property
    def nearly_constant(self) -> bool:
        """True if ``common_fraction`` is at least `NEARLY_ALL`, but not all rewards are equal."""
        return self.common_fraction >= NEARLY_ALL and not self.constant

    def __str__(self) -> str:
        if self.constant:
            return f"{self.common:.4g} in every step"
        text = f"mean {self.mean:.4g}, from {self.minimum:.4g} to {self.maximum:.4g}"
        percent = np.floor(1000 * self.common_fraction) / 10  # never rounded to 100%
        return f"{text}; {self.common:.4g} in {percent:g}% of the steps" if self.nearly_constant else text


@dataclass(frozen=True, eq=False)
class ActionStatistics:
    """Statistics of the actions of all steps, in the values of the action space.

    Args:
        minimum: smallest value of each component, float64 (A,); A is 1 for Discrete.
        maximum: largest value of each component, float64 (A,).
        frequencies: for Discrete, MultiDiscrete and MultiBinary, the fraction of the steps with each value of
            a component, one array for each component. None for Box, and for more than `COUNTED_VALUES`
            values.
        start: value to which the first frequency of each component belongs, int64 (A,); 0 for Box.
        low: lower bound of each component of a Box, float64 (A,); -inf for other spaces.
        high: upper bound of each component of a Box, float64 (A,); inf for other spaces.
    """

    minimum: NDArray[np.float64]
    maximum: NDArray[np.float64]
    frequencies: tuple[NDArray[np.float64], ...] | None
    start: NDArray[np.int64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @classmethod
    def of(cls, actions: NDArray[Any], space: spaces.Space[Any]) -> "ActionStatistics":
        """Compute the statistics of actions (N, ...) in the encoding of `Trajectories`.

        Args:
            actions: the actions.
            space: their space.
        """
        rows = actions.reshape(len(actions), -1)
        start = np.broadcast_to(np.ravel(discrete_start(space)), rows.shape[1:]).astype(np.int64)
        counts = _empty_counts(space)
        low, high = np.full(rows.shape[1], np.inf), np.full(rows.shape[1], -np.inf)
        for piece in pieces(rows):
            low, high = np.minimum(low, piece.min(axis=0)), np.maximum(high, piece.max(axis=0))
            for column, count in enumerate(counts or ()):
                count += np.bincount(piece[:, column], minlength=len(count))
        frequencies = None if counts is None else tuple(count / len(rows) for count in counts)
        return cls(low + start, high + start, frequencies, start, *_bounds(space, rows.shape[1]))

    @property
    def constant(self) -> list[int]:
        """Components that have the same value in all steps."""
        return np.flatnonzero(self.minimum == self.maximum).tolist()

    @property
    def unused(self) -> dict[int, list[int]]:
        """Values that never occur, by component; components without such values are left out."""
        absent = {
            component: (np.flatnonzero(fraction == 0) + self.start[component]).tolist()
            for component, fraction in enumerate(self.frequencies or ())
        }
        return {component: values for component, values in absent.items() if values}

    @property
    def narrow(self) -> list[int]:
        """Components of a Box that vary over less than `NARROW_FRACTION` of the range between their bounds.

        Constant components are left out, since an agent repeats their value, and components that agents do
        not scale: those without bounds, or with a range beyond float32.
        """
        with np.errstate(over="ignore"):
            limit = NARROW_FRACTION * (self.high - self.low).astype(np.float32)
        used = self.maximum - self.minimum
        return np.flatnonzero((used > 0) & (used < limit) & np.isfinite(limit)).tolist()

    def __str__(self) -> str:
        fractions = self.frequencies or ()
        if len(fractions) == 1 and len(fractions[0]) <= SHOWN_VALUES:
            return ", ".join(
                f"{value}: {fraction:.1%}" for value, fraction in enumerate(fractions[0], int(self.start[0]))
            )
        unit = "component" if len(self.minimum) == 1 else "components"
        return f"{len(self.minimum)} {unit}, from {self.minimum.min():.4g} to {self.maximum.max():.4g}"


def _bounds(space: Any, components: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the lower and the upper bounds of a Box; infinity for other spaces."""
    if isinstance(space, spaces.Box):
        return np.ravel(space.low).astype(np.float64), np.ravel(space.high).astype(np.float64)
    return np.full(components, -np.inf), np.full(components, np.inf)


def _empty_counts(space: Any) -> list[NDArray[np.int64]] | None:
    """Return a count of 0 for each discrete value; None if they are not discrete, or too many."""
    if isinstance(space, spaces.Box):
        return None
    sizes = discrete_sizes(space)
    return [np.zeros(size, np.int64) for size in sizes] if sizes.sum() <= COUNTED_VALUES else None


def pieces(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield consecutive rows of an array, as views of at most `PIECE_BYTES`."""
    rows = max(1, PIECE_BYTES // max(1, array[:1].nbytes))
    for first in range(0, len(array), rows):
        yield array[first : first + rows]
