"""Tests of checks of batches of observations and rewards."""

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
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
from rlxf.envs.batch_checks import check_finite, warn_outside
from tests.agents.gtrxl.worlds import small_agent
from tests.envs.test_step_checks import BOX, IMAGE, Returning


def warnings_of(values, space=BOX, steps=3):
    env = DummyVecEnv([Returning] * 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            warn_outside(env, space, values, step)
    return [str(each.message) for each in caught]


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
