"""The previous action, reward and done flag in the observation, across episodes."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_sb3

from rlxf.envs import PreviousTransition, TMaze, make_env, make_vec_env
from tests.envs.counters import Counter

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


def test_make_env_has_the_same_space():
    env = make_env("rlxf/TMaze-v0", previous_transition=True)
    assert (
        env.observation_space == make_vec_env("rlxf/TMaze-v0", 1, previous_transition=True).observation_space
    )


def test_dict_observation_keeps_its_keys():
    env = PreviousTransition(Counter(as_dict=True))
    assert env.reset(seed=0)[0].keys() == {"count", "last", *ADDED}


@pytest.mark.filterwarnings("ignore::UserWarning")  # a reward has no bounds, and a wrapper is not the raw env
def test_gymnasium_and_sb3_env_checkers_pass():
    check_env(PreviousTransition(TMaze(3)), skip_render_check=True)
    check_env_sb3(PreviousTransition(TMaze(3)))


def test_duplicate_key_raises():
    with pytest.raises(ValueError, match=r"\['previous_reward'\].*leave out PreviousTransition"):
        make_vec_env("CartPole-v1", 1, previous_reward=True, previous_transition=True)
