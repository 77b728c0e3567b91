"""Tests of checks of the observations, rewards and done flags of single environments."""

import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import OrderEnforcing
from stable_baselines3.common.vec_env import DummyVecEnv

from rlxf.envs import FaultyEnvironmentError
from rlxf.envs.step_checks import CheckedSteps, observation_fault, with_checked_steps
from tests.agents.gtrxl.worlds import small_agent

BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)


IMAGE = spaces.Box(0, 255, (4, 4), np.uint8)


class Returning(gymnasium.Env):
    """Environment that returns the given values from its third step on."""

    observation_space, action_space = BOX, spaces.Discrete(2)

    def __init__(self, **returned):
        self.returned, self.steps = returned, 0

    def reset(self, *, seed=None, options=None):
        return self.returned.get("first", np.zeros(3, np.float32)), {}

    def step(self, action):
        self.steps += 1
        result = {"obs": np.zeros(3, np.float32), "reward": 1.0, "terminated": False, "truncated": False}
        result |= self.returned if self.steps >= 3 else {}
        return result["obs"], result["reward"], result["terminated"], result["truncated"], {}


FAULTS = {
    "first observation of environment 1 at its step 0 has shape (1,)": {"first": np.zeros(1, np.float32)},
    "observation of environment 1 at its step 3 has shape (1,), but its space": {
        "obs": np.ones(1, np.float32)
    },
    "observation of environment 1 at its step 3 has shape (), but its space": {"obs": 0.5},
    "observation of environment 1 at its step 3 is None": {"obs": None},
    "observation of environment 1 at its step 3 is ['a', 'b', 'c']": {"obs": ["a", "b", "c"]},
    "reward of environment 1 at its step 3 is '1' (str), not a number": {"reward": "1"},
    "reward of environment 1 at its step 3 is None": {"reward": None},
    "reward of environment 1 at its step 3 is array([1., 2.])": {"reward": np.array([1.0, 2.0])},
    "terminated of environment 1 at its step 3 is None": {"terminated": None},
    "truncated of environment 1 at its step 3 is 'no' (str), not True or False": {"truncated": "no"},
    "terminated of environment 1 at its step 3 is 0.5": {"terminated": 0.5},
}


def vector_env(kind, returned):
    makes = [Returning, lambda: Returning(**returned), Returning]
    return kind(makes)


@pytest.mark.parametrize("kind", [DummyVecEnv, SyncVectorEnv], ids=["DummyVecEnv", "SyncVectorEnv"])
@pytest.mark.parametrize("message", FAULTS)
def test_training_raises_for_invalid_results(message, kind):
    with pytest.raises(FaultyEnvironmentError) as fault:
        small_agent(vector_env(kind, FAULTS[message])).learn(3 * 16)
    assert message in str(fault.value)


class Choosing(Returning):
    """Environment with a Discrete observation space."""

    observation_space = spaces.Discrete(3)

    def step(self, action):
        obs, *rest = super().step(action)
        return (obs if self.steps >= 3 else 0, *rest)

    def reset(self, *, seed=None, options=None):
        return 0, {}


@pytest.mark.parametrize("kind", [DummyVecEnv, SyncVectorEnv], ids=["DummyVecEnv", "SyncVectorEnv"])
@pytest.mark.parametrize("choice", [7, -1])
def test_training_raises_for_an_invalid_discrete_observation(choice, kind):
    with pytest.raises(FaultyEnvironmentError, match=f"at its step 3 holds {choice}, which is not in"):
        small_agent(kind([lambda: Choosing(obs=choice)] * 3)).learn(3 * 16)


def test_single_environment_is_checked():
    agent = small_agent(Returning(obs=np.ones(1, np.float32)))
    with pytest.raises(FaultyEnvironmentError, match=r"has shape \(1,\)"):
        agent.learn(16)


@pytest.mark.parametrize(
    "returned",
    [
        {"obs": np.zeros(3)},
        {"obs": [0, 1, 0]},
        {"obs": np.array([True, False, True])},
        {"reward": 1},
        {"reward": np.float64(1.0)},
        {"reward": np.array(1.0)},
        {"reward": True},
        {"terminated": np.False_, "truncated": 0},
    ],
    ids=str,
)
def test_results_that_can_be_cast_without_loss_are_accepted(returned):
    small_agent(DummyVecEnv([lambda: Returning(**returned)] * 3)).learn(3 * 16)


@pytest.mark.parametrize(
    ("space", "observation", "fault"),
    [
        (IMAGE, np.zeros((4, 4), np.int64), None),
        (IMAGE, np.full((4, 4), 256), "is of int64, which cannot be cast to uint8"),
        (IMAGE, np.zeros((4, 4)), "is of float64, which cannot be cast to uint8"),
        (spaces.Discrete(3), 1, None),
        (spaces.Discrete(3), np.int32(1), None),
        (spaces.Discrete(3), 1.0, "cannot be cast to int64"),
        (spaces.Discrete(3), 7, "holds 7, which is not in its space Discrete"),
        (spaces.Discrete(3), np.int64(-1), "holds -1"),
        (spaces.Discrete(3), np.array(3), "holds 3"),
        (spaces.Discrete(3, start=-1), -1, None),
        (spaces.Discrete(3, start=-1), 2, "holds 2"),
        (spaces.Discrete(2), True, None),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 2]), None),
        (spaces.MultiDiscrete([2, 3]), np.array([2, 2]), "holds 2"),
        (spaces.MultiDiscrete([2, 3], start=[5, 0]), [4, 0], "holds 4"),
        (spaces.MultiBinary(2), np.array([0, 1], np.int8), None),
        (spaces.MultiBinary(2), np.array([0, 2], np.int8), "holds 2"),
        (spaces.Dict(a=spaces.Discrete(3)), {"a": 3}, "in its part 'a' holds 3"),
        (spaces.Dict(a=BOX, b=IMAGE), {"a": np.zeros(3, np.float32)}, "lacks the part 'b'"),
        (spaces.Dict(a=BOX), {"a": np.zeros(2, np.float32)}, r"in its part 'a' has shape \(2,\)"),
        (spaces.Dict(a=BOX), {"a": np.zeros(3, np.float32), "more": 1}, None),
        (spaces.Dict(a=BOX), np.zeros(3), "not a dict"),
        (spaces.Tuple([BOX, spaces.Text(3)]), (np.zeros(3, np.float32), "go"), None),
        (spaces.Tuple([BOX, BOX]), (np.zeros(3, np.float32),), "lacks the part 1"),
    ],
    ids=str,
)
def test_observation_fault_describes_the_violation(space, observation, fault):
    actual = observation_fault(space, observation)
    assert (actual is None) == (fault is None)
    if fault is not None:
        with pytest.raises(AssertionError, match=fault):
            raise AssertionError(actual)


def test_environments_are_wrapped_once_and_stay_accessible():
    env = DummyVecEnv([lambda: Returning(mark=7)] * 2)
    first = with_checked_steps(with_checked_steps(env)).envs[0]
    assert isinstance(first, CheckedSteps)
    assert isinstance(first.env, Returning)
    assert first.returned == {"mark": 7}
    assert pickle.loads(pickle.dumps(first)).returned == {"mark": 7}  # noqa: S301


class Levels(gymnasium.Env):
    observation_space, action_space = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2)
    level = 0

    def reset(self, **keywords):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), float(self.level), False, False, {}


@pytest.mark.parametrize("make", [Levels, lambda: OrderEnforcing(Levels())], ids=["plain", "wrapped"])
@pytest.mark.parametrize("kind", [DummyVecEnv, SyncVectorEnv])
def test_attributes_are_set_as_without_an_agent(kind, make):
    """A callback of a user may, for example, raise the level of difficulty."""
    env, reference = (kind([make]) for _ in range(2))
    small_agent(env, n_steps=4, batch_size=4)
    for each in (env, reference):
        each.set_attr("level", 2) if kind is DummyVecEnv else each.set_attr("level", [2])
    for each in (env, reference):
        each.reset() if kind is DummyVecEnv else each.reset(seed=0)
    rewards = [each.step(np.zeros(1, np.int64))[1][0] for each in (env, reference)]
    assert rewards[0] == rewards[1]
    for each in (env, reference):
        each.set_attr("_level", 3) if kind is DummyVecEnv else each.set_attr("_level", [3])
    assert getattr(env.envs[0].unwrapped, "_level", None) == getattr(
        reference.envs[0].unwrapped, "_level", None
    )
    if make is Levels or kind is SyncVectorEnv:  # DummyVecEnv sets the attribute of the outermost wrapper
        assert rewards[0] == 2.0
