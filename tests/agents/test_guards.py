"""Invalid results of vector environments are rejected."""

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from rlxf.agents.common.numerics import check_initial_observations, check_step_results
from rlxf.envs import FaultyEnvironmentError
from tests.envs.test_step_checks import Choosing


@pytest.fixture
def env():
    return DummyVecEnv([Choosing] * 2)


@pytest.mark.parametrize("dones", [[None, False], [None, None], ["no", "no"], [[], False]], ids=str)
def test_dones_that_are_not_numbers_are_rejected(env, dones):
    ends = np.empty(2, object)
    ends[:] = dones
    with pytest.raises(FaultyEnvironmentError, match="dones at step 3 must be True or False, got"):
        check_step_results(env, np.zeros(2, int), np.zeros(2), 3, dones=ends)


@pytest.mark.parametrize("kind", [bool, np.int64, np.float32, np.uint8])
def test_dones_may_be_numbers(env, kind):
    check_step_results(env, np.zeros(2, int), np.zeros(2), 3, dones=np.array([True, False]).astype(kind))


@pytest.mark.parametrize(
    ("space", "values", "message"),
    [
        (spaces.Discrete(3), np.array([0, 7]), "holds 7"),
        (spaces.Discrete(3), np.array([0, -1]), "holds -1"),
        (spaces.MultiDiscrete([2, 3]), np.array([[1, 2], [0, 3]]), "holds 3"),
        (spaces.MultiBinary(2), np.array([[1, 0], [0, 2]]), "holds 2"),
        (spaces.Dict(a=spaces.Discrete(3)), {"a": np.array([3, 0])}, "holds 3"),
    ],
    ids=str,
)
def test_invalid_choice_in_a_batch_is_rejected(env, space, values, message):
    with pytest.raises(FaultyEnvironmentError, match=f"{message}, which is not in its space"):
        check_step_results(env, values, np.zeros(2), 3, space=space)
    with pytest.raises(FaultyEnvironmentError, match=f"{message}, which is not in its space"):
        check_initial_observations(env, values, 0, space=space)
