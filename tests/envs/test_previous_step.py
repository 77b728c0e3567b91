"""Tests of the previous reward, step and transition in the observation."""

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import OrderEnforcing
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as check_env_sb3

from rlxf.envs import PreviousReward, PreviousStep, PreviousTransition, TMaze, make_env, make_vec_env
from tests.envs.small_envs import Counter


def test_observation_has_the_previous_reward():
    env = PreviousReward(Counter())
    observation, _ = env.reset(seed=0)
    assert observation["previous_reward"].tolist() == [0]
    for action in (2, 1, 2):
        observation, reward, *_ = env.step(action)
        assert observation in env.observation_space
        assert observation["previous_reward"].dtype == np.float32
        assert observation["previous_reward"].tolist() == [reward] != [0]
    again, _ = env.reset()
    assert again["previous_reward"].tolist() == [0]


class WithoutOptions(Counter):
    """Environment of the interface before ``options``."""

    def reset(self, *, seed=None):
        return super().reset(seed=seed)


@pytest.mark.parametrize("wrapper", [PreviousReward, PreviousStep, PreviousTransition])
def test_environment_need_not_take_options(wrapper):
    observation, _ = wrapper(WithoutOptions()).reset(seed=0)
    assert observation["previous_reward"] == [0]


def test_dict_observation_keeps_its_keys_of_previous_reward():
    observation, _ = PreviousReward(Counter(as_dict=True)).reset(seed=0)
    assert observation.keys() == {"count", "last", "previous_reward"}


@pytest.mark.filterwarnings("ignore::UserWarning")  # a reward has no bounds, and a wrapper is not the raw env
def test_gymnasium_env_checker_passes():
    check_env(PreviousReward(TMaze(3)), skip_render_check=True)


def test_duplicate_key_raises_of_previous_reward():
    with pytest.raises(ValueError, match=r"\['previous_reward'\].*leave out PreviousReward"):
        PreviousReward(PreviousReward(TMaze()))


@pytest.mark.parametrize("env_id", ["rlxf/TMaze-v0", "CartPole-v1", "popgym-RepeatPreviousEasy-v0"])
def test_make_vec_env_adds_the_previous_reward(env_id):
    plain, with_reward = (
        make_vec_env(env_id, 2, seed=0),
        make_vec_env(env_id, 2, seed=0, previous_reward=True),
    )
    np.testing.assert_array_equal(with_reward.reset()["observation"], plain.reset())
    for _ in range(3):
        actions = np.zeros(2, dtype=np.int64)
        observation, rewards, *_ = with_reward.step(actions)
        np.testing.assert_array_equal(observation["previous_reward"][:, 0], rewards)


def test_terminal_observation_has_the_last_reward():
    env = make_vec_env("rlxf/TMaze-v0", 1, env_kwargs={"corridor_length": 1}, previous_reward=True)
    env.reset()
    ended = False
    while not ended:
        observation, (reward,), (ended,), (info,) = env.step(np.array([1]))
    assert info["terminal_observation"]["previous_reward"] == pytest.approx([reward])
    assert observation["previous_reward"].tolist() == [[0]]


def test_previous_reward_wraps_the_wrapper_class():
    env = make_vec_env("CartPole-v1", 1, wrapper_class=PreviousReward)
    with pytest.raises(ValueError, match="previous_reward"):
        make_vec_env("CartPole-v1", 1, wrapper_class=PreviousReward, previous_reward=True)
    assert "previous_reward" in env.reset()


class Echo(gymnasium.Env):
    """Environment with a given action space and rewards 1, 2, 3, ..."""

    def __init__(self, action_space: spaces.Space):
        self.observation_space = spaces.Box(0, 1, (1,))
        self.action_space = action_space
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.ones(1, np.float32), float(self.steps), False, False, {}


@pytest.mark.parametrize(
    ("space", "action", "expected"),
    [
        (spaces.Discrete(4), np.int64(2), [0, 0, 1, 0]),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 2]), [0, 1, 0, 0, 1]),
        (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8), [1, 0, 1]),
        (spaces.Box(-2, 2, (2, 2)), np.array([[0.5, -1], [2, 0]], np.float32), [0.5, -1, 2, 0]),
        (spaces.Box(1, 2, (1,)), np.array([1.5], np.float32), [1.5]),
    ],
)
def test_observation_has_the_previous_action_and_reward(space, action, expected):
    env = PreviousStep(Echo(space))
    first, _ = env.reset(seed=0)
    assert first in env.observation_space
    assert not first["previous_action"].any()
    assert first["previous_reward"].tolist() == [0]
    for step in (1, 2):
        observation, reward, *_ = env.step(action)
        assert observation in env.observation_space
        assert observation["previous_action"].tolist() == expected
        assert observation["previous_reward"].tolist() == [step] == [reward]
        assert observation["observation"].tolist() == [1]
    again, _ = env.reset()
    assert not again["previous_action"].any()
    assert again["previous_reward"].tolist() == [0]


def test_earlier_observations_do_not_change():
    env = PreviousStep(Echo(spaces.Discrete(2)))
    first, _ = env.reset()
    env.step(1)
    assert not first["previous_action"].any()


def test_dict_observation_keeps_its_keys():
    env = PreviousStep(Counter(as_dict=True))
    observation, _ = env.reset(seed=0)
    assert observation.keys() == {"count", "last", "previous_action", "previous_reward"}
    assert observation in env.observation_space


@pytest.mark.filterwarnings("ignore::UserWarning")  # a reward has no bounds, and a wrapper is not the raw env
def test_gymnasium_and_sb3_env_checkers_pass():
    check_env(PreviousStep(TMaze(3)), skip_render_check=True)
    check_env_sb3(PreviousStep(TMaze(3)))


def test_duplicate_keys_raise():
    with pytest.raises(ValueError, match=r"\['previous_action', 'previous_reward'\]"):
        PreviousStep(PreviousStep(TMaze()))


def test_unsupported_space_raises():
    with pytest.raises(TypeError, match="Tuple"):
        PreviousStep(Echo(spaces.Tuple([spaces.Discrete(2)])))


def test_multi_input_policy_trains():
    env = make_vec_env(
        "rlxf/TMaze-v0", 2, seed=0, env_kwargs={"corridor_length": 2}, wrapper_class=PreviousStep
    )
    model = PPO("MultiInputPolicy", env, n_steps=16, batch_size=32, n_epochs=1, seed=0, device="cpu")
    assert model.learn(32).num_timesteps == 32


ADDED = ("previous_action", "previous_reward", "previous_done")


class Short(gymnasium.Env):
    """Environment with episodes of two steps, terminated and truncated in turn, and rewards 1, 2, 3, ..."""

    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(3)
    total_steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.total_steps += 1
        terminated, truncated = self.total_steps % 4 == 2, self.total_steps % 4 == 0
        return np.ones(1, np.float32), float(self.total_steps), terminated, truncated, {}


def added(observation):
    return [observation[key].tolist() for key in ADDED]


NOTHING = [[0, 0, 0], [0], [0]]


def test_first_observation_has_the_last_transition_of_the_previous_episode():
    env = PreviousTransition(Short())
    assert added(env.reset(seed=0)[0]) == NOTHING
    assert added(env.step(1)[0]) == [[0, 1, 0], [1], [0]]
    last, _, terminated, _, _ = env.step(2)
    assert terminated
    assert added(last) == [[0, 0, 1], [2], [0]]  # the last observation is part of the episode that ends
    assert added(env.reset()[0]) == [[0, 0, 1], [2], [1]]
    assert added(env.step(0)[0]) == [[1, 0, 0], [3], [0]]
    assert env.step(1)[3]
    assert added(env.reset()[0]) == [[0, 1, 0], [4], [1]]


def test_reset_with_a_seed_or_within_an_episode_clears_the_transition():
    env = PreviousTransition(Short())
    env.reset()
    for _ in range(2):
        env.step(1)
    assert added(env.reset(seed=3)[0]) == NOTHING
    env.step(1)
    assert added(env.reset()[0]) == NOTHING
    for _ in range(2):
        env.step(1)
    env.reset()
    assert added(env.reset()[0]) == NOTHING


def test_vector_environment_has_the_transition_at_autoreset():
    env = make_vec_env("rlxf/TMaze-v0", 1, 0, {"corridor_length": 1}, previous_transition=True)
    assert not any(np.any(env.reset()[key]) for key in ADDED)
    env.step(np.array([0]))
    observation, reward, done, (info,) = env.step(np.array([2]))
    assert done.all()
    assert added(info["terminal_observation"])[1:] == [pytest.approx([reward[0]]), [0]]
    assert observation["previous_reward"] == pytest.approx(reward[None])
    assert observation["previous_done"].tolist() == [[1]]


class RenamedTransition(PreviousTransition):
    """Subclass of `PreviousTransition`."""


@pytest.mark.parametrize(
    "wrapper",
    [
        PreviousTransition,
        RenamedTransition,
        partial(PreviousTransition),
        lambda env: OrderEnforcing(PreviousTransition(env)),
    ],
)
def test_transitions_inside_of_the_seeded_resets_are_refused(wrapper):
    """Each episode is reset with a seed, at which the wrapper would clear the transition."""
    for make in (partial(make_vec_env, n_envs=1), make_env):
        with pytest.raises(ValueError, match="pass previous_transition=True instead of the wrapper"):
            make("rlxf/TMaze-v0", wrapper_class=wrapper)
    with pytest.raises(ValueError, match="pass previous_transition=True"):
        make_vec_env(lambda: wrapper(TMaze(3)), 1)


def test_make_env_has_the_same_space():
    env = make_env("rlxf/TMaze-v0", previous_transition=True)
    assert (
        env.observation_space == make_vec_env("rlxf/TMaze-v0", 1, previous_transition=True).observation_space
    )


def test_dict_observation_keeps_its_keys_of_previous_transition():
    env = PreviousTransition(Counter(as_dict=True))
    assert env.reset(seed=0)[0].keys() == {"count", "last", *ADDED}


@pytest.mark.filterwarnings("ignore::UserWarning")  # a reward has no bounds, and a wrapper is not the raw env
def test_gymnasium_and_sb3_env_checkers_pass_of_previous_transition():
    check_env(PreviousTransition(TMaze(3)), skip_render_check=True)
    check_env_sb3(PreviousTransition(TMaze(3)))


def test_duplicate_key_raises_of_previous_transition():
    with pytest.raises(ValueError, match=r"\['previous_reward'\].*leave out PreviousTransition"):
        make_vec_env("CartPole-v1", 1, previous_reward=True, previous_transition=True)
