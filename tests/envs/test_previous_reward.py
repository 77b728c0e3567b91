"""The previous reward in the observation, with the wrapper and with `make_vec_env`."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rlxf.envs import PreviousReward, TMaze, make_vec_env
from tests.envs.counters import Counter


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


def test_dict_observation_keeps_its_keys():
    observation, _ = PreviousReward(Counter(as_dict=True)).reset(seed=0)
    assert observation.keys() == {"count", "last", "previous_reward"}


@pytest.mark.filterwarnings("ignore::UserWarning")  # a reward has no bounds, and a wrapper is not the raw env
def test_gymnasium_env_checker_passes():
    check_env(PreviousReward(TMaze(3)), skip_render_check=True)


def test_duplicate_key_raises():
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
