"""Running mean and standard deviation of the columns of rows, for the normalization of observations."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.running_mean_std import RunningMeanStd

from rlxf.data.encoders import ImageEncoder, VectorEncoder, has_image_extractor

FLOAT32 = np.finfo(np.float32)


class RunningStats(RunningMeanStd):
    """Running ``mean``, ``var`` and ``std`` per column, (D,), of the rows passed to ``update``, (n, D).

    The statistics are exact: SB3's base class starts with a small weight for mean 0 and variance 1, which is
    0 here. Pieces are combined as in Chan, Golub and LeVeque 1983, "Algorithms for computing the sample
    variance". Columns far from zero therefore lose no precision, if the rows are float64.

    Args:
        columns: number of columns D.
        constant_std: ``std`` of constant columns.
    """

    def __init__(self, columns: int, constant_std: float = 1.0):
        super().__init__(epsilon=0.0, shape=(columns,))
        self.constant_std = constant_std
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

        The reference implementation of Decision Transformer adds 1e-6 instead. This scales any deviation
        from a constant by a million, and removes columns of a small scale.
        """
        return np.where(self.constant, self.constant_std, np.sqrt(self.var)).astype(np.float32)


def observation_stats(encode: VectorEncoder | ImageEncoder) -> RunningStats | None:
    """Return empty statistics of observations; None for images that pass through a convolution.

    The standard deviation of constant values of images is the range of a byte, so that other values, which
    an agent may meet, are scaled to [-1, 1].
    """
    if has_image_extractor(encode.shape):
        return None
    constant = 255.0 if isinstance(encode, ImageEncoder) else 1.0
    return RunningStats(math.prod(encode.shape), constant)
