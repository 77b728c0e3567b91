"""Environments with the interface of gym before 0.26 raise errors that name that of Gymnasium."""

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import OrderEnforcing, TimeLimit
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from rlxf import collect, evaluate
from rlxf.envs import FaultyEnvironmentError, make_vec_env
from tests.agents.gtrxl.worlds import small_agent
from tests.evaluation.worlds import Idle


class Old(gymnasium.Env):
    """Environment of three steps whose methods return the given results."""

    observation_space, action_space = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2)

    def __init__(self, step=None, reset=None):
        self.result, self.first, self.steps = step, reset, 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return (self.observation_space.low, {}) if self.first is None else self.first

    def step(self, action):
        self.steps += 1
        observation = self.observation_space.low
        return (observation, 1.0, self.steps == 3, False, {}) if self.result is None else self.result


class Unseeded(Old):
    def reset(self):
        return self.observation_space.low, {}


class Miscounted(Old):
    """Environment with a fault of its own."""

    def step(self, action):
        observation, reward, terminated, truncated, info = [1, 2, 3, 4]
        return observation, reward, terminated, truncated, info


LOW = Old.observation_space.low
STEP = r"step of <.*Old instance> must return \(observation, reward, terminated, truncated, info\); "
RESET = r"reset of <.*Old instance> must return \(observation, info\); "
CASES = {
    "four values": (partial(Old, (LOW, 1.0, False, {})), STEP + "4 values are the API of gym < 0.26"),
    "no tuple": (partial(Old, 1.0), STEP + "other values may be the API of gym < 0.26"),
    "six values": (partial(Old, (LOW, 1.0, False, False, {}, 1)), STEP),
    "no info": (partial(Old, (LOW, 1.0, False, False, None)), STEP + "its info is None, not a dict"),
    "reset without info": (partial(Old, reset=LOW), RESET + "other values may be the API of gym < 0.26"),
    "reset of two numbers": (partial(Old, reset=LOW[:2]), RESET + r"its info is .*-1.0.*, not a dict"),
    "reset with None": (partial(Old, reset=(LOW, None)), RESET + "its info is None, not a dict"),
    "reset without seed": (Unseeded, r"reset of .* does not accept 'seed', as in the API of gym < 0.26"),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


WRAPPERS = {
    "bare": lambda make: make(),
    "wrapped": lambda make: Monitor(TimeLimit(OrderEnforcing(make()), 5)),
    "made": lambda make: make_vec_env(make, 1),
    "DummyVecEnv": lambda make: DummyVecEnv([make]),
    "SyncVectorEnv": lambda make: SyncVectorEnv([make]),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_training_names_the_interface(case, wrap):
    make, message = case
    with pytest.raises(FaultyEnvironmentError, match=message):
        small_agent(wrap(make), n_envs=1).learn(32)


@pytest.mark.parametrize("wrap", [WRAPPERS["bare"], WRAPPERS["made"]], ids=["bare", "made"])
def test_evaluation_and_recording_name_the_interface(case, wrap, minari_root):
    make, message = case
    with pytest.raises(FaultyEnvironmentError, match=message):
        evaluate(Idle(), wrap(make), 2)
    with pytest.raises(FaultyEnvironmentError, match=message):
        collect(None, wrap(make), "test/old-v0", 2)


def test_faults_of_the_environment_itself_are_not_renamed():
    with pytest.raises(ValueError, match=r"not enough values to unpack") as caught:
        evaluate(Idle(), Monitor(Miscounted()), 2)
    assert not isinstance(caught.value, FaultyEnvironmentError)


class Simulated(Old):
    """Environment whose simulator takes no seed."""

    def reset(self, *, seed=None, options=None):
        return self.simulate(seed=seed)

    def simulate(self):
        """Return nothing."""


class Unpacking(gymnasium.Wrapper):
    """Wrapper with a fault of its own."""

    def step(self, action):
        first, second = self.env.step(action)
        return first, second


def test_faults_of_an_environment_inside_are_not_renamed():
    simulator = Simulated()
    simulator.simulate = Unseeded().reset
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'seed'") as caught:
        evaluate(Idle(), Monitor(simulator), 2)
    assert not isinstance(caught.value, FaultyEnvironmentError)


def test_faults_of_a_wrapper_are_not_those_of_the_environment():
    with pytest.raises(ValueError, match=r"too many values to unpack") as caught:
        evaluate(Idle(), Monitor(Unpacking(Old())), 2)
    assert not isinstance(caught.value, FaultyEnvironmentError)
