"""Running mean and standard deviation of the columns of rows, for the normalization of observations."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.running_mean_std import RunningMeanStd

from rlxf.data.encoders import ImageEncoder, VectorEncoder, has_image_extractor

FLOAT32 = np.finfo(np.float32)
IMAGE_STD_FRACTION = 1 / 16
"""Smallest standard deviation of image values that vary, as a fraction of the largest value of all images."""


class RunningStats(RunningMeanStd):
    """Running ``mean``, ``var`` and ``std`` per column, (D,), of the rows passed to ``update``, (n, D).

    The statistics are exact: SB3's base class starts with a small weight for mean 0 and variance 1, which is
    0 here. Pieces are combined as in Chan, Golub and LeVeque 1983, "Algorithms for computing the sample
    variance". Columns far from zero therefore lose no precision, if the rows are float64.

    Args:
        columns: number of columns D.
        constant_std: ``std`` of constant columns.
        min_fraction: smallest ``std`` of other columns, as a fraction of the largest absolute value of all
            rows and columns; 0 for no bound.
    """

    def __init__(self, columns: int, constant_std: float = 1.0, min_fraction: float = 0.0):
        super().__init__(epsilon=0.0, shape=(columns,))
        self.constant_std = constant_std
        self.min_fraction = min_fraction
        self.largest = np.zeros(columns)

    def update(self, arr: NDArray[Any]) -> None:
        """Add rows (n, D)."""
        self.largest = np.maximum(self.largest, np.abs(arr).max(axis=0))
        super().update(arr)

    @property
    def constant(self) -> NDArray[np.bool_]:
        """True for columns without variation beyond the rounding of float32, (D,).

        Their standard deviation is at most 1.2e-7 times their largest absolute value. Columns of any scale
        are therefore treated alike, down to the smallest normal number of float32.
        """
        return np.sqrt(self.var) <= np.maximum(FLOAT32.eps * self.largest, FLOAT32.tiny)

    @property
    def std(self) -> NDArray[np.float32]:
        """Population standard deviation of the columns, (D,); ``constant_std`` for constant ones.

        With ``min_fraction``, smaller values are replaced by this fraction of the largest absolute value.

        The reference implementation of Decision Transformer adds 1e-6 instead. This scales any deviation
        from a constant by a million, and removes columns of a small scale.
        """
        std = np.maximum(np.sqrt(self.var), self.min_fraction * self.largest.max(initial=0))
        return np.where(self.constant, self.constant_std, std).astype(np.float32)


def observation_stats(encode: VectorEncoder | ImageEncoder) -> RunningStats | None:
    """Return empty statistics of observations; None for images that pass through a convolution.

    The standard deviation of constant values of images is the range of a byte, so that other values, which
    an agent may meet, are scaled to [-1, 1]. That of other values is at least `IMAGE_STD_FRACTION` of the
    largest value of all images, so the values of the data are scaled to [-16, 16]. Without this bound, a
    value that is 255 once in 200,000 steps, else 0, would become 447. The bound is relative to the data,
    because the values of a grid such as those of MiniGrid are far below 255.
    """
    if has_image_extractor(encode.shape):
        return None
    columns = math.prod(encode.shape)
    is_image = isinstance(encode, ImageEncoder)
    return RunningStats(columns, 255.0, IMAGE_STD_FRACTION) if is_image else RunningStats(columns)


PIECE_NUMBERS = 2**20
"""Number of values that are converted to float64 at once."""


def add_observations(stats: RunningStats, rows: NDArray[Any]) -> None:
    """Add encoded observations (n, ...) to statistics of their values, in pieces, to save memory."""
    piece = max(1, PIECE_NUMBERS // max(1, math.prod(rows.shape[1:])))
    for start in range(0, len(rows), piece):
        values = rows[start : start + piece]
        stats.update(values.reshape(len(values), -1).astype(np.float64))


def observation_moments(
    encode: VectorEncoder | ImageEncoder, rows: NDArray[Any]
) -> tuple[NDArray[np.float32], NDArray[np.float32]] | tuple[None, None]:
    """Return mean and std of encoded observations (N, ...); None for images that pass through a convolution.

    They have the shape and the rules of `rlxf.data.Trajectories`.
    """
    stats = observation_stats(encode)
    if stats is None:
        return None, None
    add_observations(stats, rows)
    return stats.mean.astype(np.float32).reshape(encode.shape), stats.std.reshape(encode.shape)
