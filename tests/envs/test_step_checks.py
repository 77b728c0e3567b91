"""Tests of checks of observations, rewards and done flags."""

import pickle
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import OrderEnforcing
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecEnvWrapper,
    VecExtractDictObs,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)

from rlxf import GTrXLPPO
from rlxf.envs import FaultyEnvironmentError
from rlxf.envs.step_checks import (
    CheckedSteps,
    check_finite,
    observation_fault,
    warn_outside,
    with_checked_steps,
)
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


def warnings_of(values, space=BOX, steps=3):
    env = DummyVecEnv([Returning] * 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            warn_outside(env, space, values, step)
    return [str(each.message) for each in caught]


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


def test_value_outside_the_bounds_warns_once():
    (message,) = warnings_of(np.array([[0, 0, 0], [0, 1.5, 0]], np.float32))
    assert (
        "observation of environment 1 at its step 0 is 1.5 at index [1], outside of its space Box" in message
    )


@pytest.mark.parametrize(
    ("space", "values"),
    [
        (BOX, np.full((2, 3), 1 + 5e-5, np.float32)),
        (BOX, np.full((2, 3), -1.0, np.float32)),
        (spaces.Box(-np.inf, np.inf, (3,)), np.full((2, 3), 1e30)),
        (spaces.Box(-1e6, 1e6, (3,)), np.full((2, 3), 1e6 + 10)),
        (IMAGE, np.full((2, 4, 4), 255, np.uint8)),
        (spaces.Discrete(3), np.array([0, 2])),
    ],
    ids=str,
)
def test_rounding_and_unbounded_spaces_do_not_warn(space, values):
    assert warnings_of(values, space) == []


def test_warning_has_the_key_of_a_dict():
    values = {"a": np.zeros((2, 3)), "b": np.array([[9.0], [0.0]])}
    (message,) = warnings_of(values, spaces.Dict(a=BOX, b=spaces.Box(0, 1, (1,))))
    assert "observation 'b' of environment 0" in message


def test_training_warns_of_bounds_and_continues():
    env = DummyVecEnv([lambda: Returning(obs=np.array([0, 2, 0], np.float32))] * 3)
    with pytest.warns(
        UserWarning, match=r"at its step 3 is 2.0 at index \[1\], outside of its space"
    ) as caught:
        agent = small_agent(env).learn(3 * 16)
    assert isinstance(agent, GTrXLPPO)
    assert sum("outside of its space" in str(each.message) for each in caught) == 1


GOOD = np.zeros((3, 2, 2), np.float32)


def with_value(value):
    values = GOOD.copy()
    values[1, 0, 1] = value
    return values


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda values: values, "observation"),
        (lambda values: {"number": np.arange(3), "image": values}, "observation 'image'"),
        (lambda values: (np.arange(3), values), "observation 1"),
        (lambda values: {"both": (GOOD, values)}, "observation 'both' 1"),
    ],
    ids=["array", "Dict", "Tuple", "nested"],
)
def test_error_has_environment_step_and_index_of_the_first_value(wrap, name, value):
    check_finite("observation", wrap(GOOD), 7)
    with pytest.raises(FaultyEnvironmentError) as fault:
        check_finite("observation", wrap(with_value(value)), 7)
    assert str(fault.value).startswith(
        f"{name} of environment 1 is not finite at its step 7: {value} at index [0, 1];"
    )


def test_error_for_one_number_per_environment_has_no_index():
    with pytest.raises(FaultyEnvironmentError, match=r"environment 2 is .* step 0: nan; correct"):
        check_finite("reward", np.array([0.0, 1.0, np.nan]), 0)


def test_rows_of_a_subset_of_environments():
    with pytest.raises(FaultyEnvironmentError, match="environment 8 is not finite"):
        check_finite("observation", with_value(np.nan), 7, environments=[4, 8, 9])


@pytest.mark.parametrize("values", [np.array([1, 2]), np.array([True]), np.array(["nan"], object)])
def test_values_that_are_not_floats_pass(values):
    check_finite("observation", values, 0)


class Uneven(gymnasium.Env):
    """Environment with the same observation in each step, in a Box whose bounds are given."""

    action_space = spaces.Discrete(2)

    def __init__(self, high, observation, key=None, low=None):
        observation, high = np.array(observation, np.float32), np.array(high, np.float32)
        space = spaces.Box(-high if low is None else np.array(low, np.float32), high)
        self.observation = observation if key is None else {key: observation}
        self.observation_space = space if key is None else spaces.Dict({key: space})

    def reset(self, **keywords):
        return self.observation, {}

    def step(self, action):
        return self.observation, 1.0, False, False, {}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("high", "value"), [([1, 2], [0.5, 2]), ([[1, 2], [3, 4]], [[0.5, 2], [1, 4]])])
@pytest.mark.parametrize("key", [None, "place"], ids=["Box", "Dict"])
def test_bounds_of_stacked_frames(key, high, value, normalize):
    """SB3 repeats the bounds of each number, but concatenates whole frames."""
    env = VecFrameStack(DummyVecEnv([lambda: Uneven(high, value, key)] * 2), 3)
    policy = "MlpGTrXLPolicy" if key is None else "MultiInputGTrXLPolicy"
    agent = GTrXLPPO(
        policy,
        VecNormalize(env) if normalize else env,
        n_steps=8,
        segment_length=8,
        batch_size=8,
        device="cpu",
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "observation")
        agent.learn(64)


def test_value_outside_the_bounds_of_stacked_frames_warns():
    env = VecFrameStack(DummyVecEnv([lambda: Uneven([1, 2], [1.5, 2])]), 3)
    agent = GTrXLPPO("MlpGTrXLPolicy", env, n_steps=8, segment_length=8, batch_size=8, device="cpu")
    with pytest.warns(UserWarning, match=r"is 1.5 at index \[4\], outside of its space"):
        agent.learn(8)


class LastFrames(VecEnvWrapper):
    """Wrapper that returns the last numbers of each observation."""

    def __init__(self, venv, space):
        super().__init__(venv, observation_space=space)

    def reset(self):
        return self._last(self.venv.reset())

    def step_wait(self):
        observations, *results = self.venv.step_wait()
        return self._last(observations), *results

    def _last(self, observations):
        return observations[:, -self.observation_space.shape[0] :]


def _frames_of(key=None):
    """Return three stacked frames of an environment whose two numbers have other bounds."""
    return VecFrameStack(DummyVecEnv([lambda: Uneven([1, 2], [0.5, 2], key)]), 3)


CHANGED = {
    "part of a Dict": lambda: VecExtractDictObs(_frames_of("place"), "place"),
    "last frame": lambda: LastFrames(_frames_of(), Uneven([1, 2], [0, 0]).observation_space),
    "size that no frames have": lambda: LastFrames(_frames_of(), spaces.Box(-2, 2, (5,))),
    "frames of frames": lambda: VecFrameStack(_frames_of(), 2),
    "none": lambda: VecMonitor(_frames_of()),
    "none, without 0": lambda: VecFrameStack(DummyVecEnv([lambda: Uneven([2, 2], [1, 2], low=[1, 1])]), 3),
}


@pytest.mark.parametrize("make", CHANGED.values(), ids=CHANGED)
def test_bounds_of_frames_in_other_wrappers(make):
    env = make()
    env.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            warn_outside(env, env.observation_space, env.step(np.array([0]))[0], step)
    if isinstance(env, VecMonitor):
        with pytest.warns(UserWarning, match=r"is 1.5 at index \[4\], outside of its space"):
            warn_outside(env, env.observation_space, np.array([[0, 0, 0, 0, 1.5, 0]]), 6)
