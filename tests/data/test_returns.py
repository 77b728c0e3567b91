""""""

import numpy as np
import pytest

from rlxf.data import return_to_go


@pytest.mark.parametrize("length", [1, 2, 50])
def test_return_to_go_is_the_sum_of_future_rewards(length):
    rewards = np.random.default_rng(0).normal(size=length)
    slow = [sum(rewards[t:]) for t in range(length)]
    np.testing.assert_allclose(return_to_go(rewards), slow, rtol=1e-12)


def test_sums_have_float64_precision():
    rewards = np.array([1e8] + [1.0] * 1000, np.float32)
    assert return_to_go(rewards)[0] == 1e8 + 1000
