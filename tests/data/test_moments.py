""""""

import numpy as np
import pytest

from rlxf.data.conversion import RunningStats

RNG = np.random.default_rng(0)


def moments_of(rows, *cuts):
    moments = RunningStats(rows.shape[1])
    for piece in np.split(rows, cuts):
        moments.add(piece)
    return moments


@pytest.mark.parametrize(
    "cuts", [(), (1, 2, 3), (40,), (99,)], ids=["whole", "single rows", "halves", "rest"]
)
def test_moments_of_pieces_equal_those_of_the_whole(cuts):
    rows = RNG.normal(size=(100, 4)) * [1, 10, 0.01, 1e-3] + [0, 5, -3, 0]
    moments = moments_of(rows, *cuts)
    np.testing.assert_allclose(moments.mean, rows.mean(axis=0), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(moments.std, rows.std(axis=0), rtol=1e-6)


def test_columns_far_from_zero_keep_their_precision():
    rows = 1e7 + RNG.normal(size=(1000, 1))
    np.testing.assert_allclose(moments_of(rows, 10, 500).std, rows.std(), rtol=1e-6)


def test_constant_columns_have_standard_deviation_1():
    rows = np.full((50, 2), 0.1, np.float32)
    moments = moments_of(rows, 7)
    np.testing.assert_array_equal(moments.std, [1, 1])
    np.testing.assert_array_equal(moments.mean, rows[0])
