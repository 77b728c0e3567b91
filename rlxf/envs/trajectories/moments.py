"""Running mean and standard deviation of rows that arrive in pieces."""

import numpy as np
from numpy.typing import NDArray

SMALLEST_STD = 1e-6


class Moments:
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
