"""The reward before in the observation, by the wrapper and by `make_vec_env`."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rlxf.envs import PreviousReward, TMaze, make_vec_env
from tests.envs.counters import Counter


def test_each_observation_holds_the_reward_of_the_step_before():
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


def test_a_dict_observation_keeps_its_keys():
    observation, _ = PreviousReward(Counter(as_dict=True)).reset(seed=0)
    assert observation.keys() == {"count", "last", "previous_reward"}


@pytest.mark.filterwarnings("ignore::UserWarning")  # a reward has no bounds, and a wrapper is not the raw env
def test_the_checker_of_gymnasium_passes():
    check_env(PreviousReward(TMaze(3)), skip_render_check=True)


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(ValueError, match=r"\['previous_reward'\].*leave out PreviousReward"):
        PreviousReward(PreviousReward(TMaze()))


@pytest.mark.parametrize("env_id", ["rlxf/TMaze-v0", "CartPole-v1", "popgym-RepeatPreviousEasy-v0"])
def test_any_task_is_made_with_it(env_id):
    plain, with_reward = (
        make_vec_env(env_id, 2, seed=0),
        make_vec_env(env_id, 2, seed=0, previous_reward=True),
    )
    np.testing.assert_array_equal(with_reward.reset()["observation"], plain.reset())
    for _ in range(3):
        actions = np.zeros(2, dtype=np.int64)
        observation, rewards, *_ = with_reward.step(actions)
        np.testing.assert_array_equal(observation["previous_reward"][:, 0], rewards)


def test_the_last_observation_of_an_episode_holds_the_last_reward():
    env = make_vec_env("rlxf/TMaze-v0", 1, env_kwargs={"corridor_length": 1}, previous_reward=True)
    env.reset()
    ended = False
    while not ended:
        observation, (reward,), (ended,), (info,) = env.step(np.array([1]))
    assert info["terminal_observation"]["previous_reward"] == pytest.approx([reward])
    assert observation["previous_reward"].tolist() == [[0]]


def test_it_stands_around_a_wrapper_of_ones_own():
    env = make_vec_env("CartPole-v1", 1, wrapper_class=PreviousReward)
    with pytest.raises(ValueError, match="previous_reward"):
        make_vec_env("CartPole-v1", 1, wrapper_class=PreviousReward, previous_reward=True)
    assert "previous_reward" in env.reset()
