import numpy as np
import pytest

from rlxf.envs.trajectories import return_to_go


@pytest.mark.parametrize("length", [1, 2, 50])
def test_it_is_the_sum_of_the_rewards_to_come(length):
    rewards = np.random.default_rng(0).normal(size=length)
    slow = [sum(rewards[t:]) for t in range(length)]
    np.testing.assert_allclose(return_to_go(rewards), slow, rtol=1e-12)


def test_small_rewards_after_large_ones_are_not_lost():
    rewards = np.array([1e8] + [1.0] * 1000, np.float32)
    assert return_to_go(rewards)[0] == 1e8 + 1000
