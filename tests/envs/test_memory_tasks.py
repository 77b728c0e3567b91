import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import FilterObservation
from stable_baselines3.common.vec_env import VecEnv

from rlxf.envs import make_vec_env
from rlxf.envs.make import minigrid_view

TASKS = [
    "popgym-RepeatPreviousEasy-v0",
    "popgym-AutoencodeEasy-v0",
    "popgym-BattleshipEasy-v0",
    "popgym-ConcentrationEasy-v0",
    "popgym-PositionOnlyPendulumEasy-v0",
    "MiniGrid-MemoryS7-v0",
    "MiniGrid-MemoryS13Random-v0",
]


def play(env: VecEnv, steps: int) -> tuple[list, list]:
    """Play random actions; return all observations and the last info of each episode."""
    env.action_space.seed(0)
    observations, ends = [env.reset()], []
    for _ in range(steps):
        actions = np.array([env.action_space.sample() for _ in range(env.num_envs)])
        observation, _, ended, infos = env.step(actions)
        observations.append(observation)
        ends += [infos[i] for i in np.flatnonzero(ended)]
    return observations, ends


@pytest.mark.parametrize("env_id", TASKS)
def test_memory_tasks_are_reproducible_and_raise_no_warning(env_id):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observations, ends = play(make_vec_env(env_id, 4, seed=0), 300)
        again, _ = play(make_vec_env(env_id, 4, seed=0), 300)
    np.testing.assert_array_equal(observations, again)
    assert ends
    assert all(info["episode"]["l"] > 1 for info in ends)


def test_tuple_observation_is_flattened():
    env = make_vec_env("popgym-AutoencodeEasy-v0", 2)
    assert env.observation_space.shape == (2 + 4,)
    assert env.reset().sum(axis=1).tolist() == [2, 2]


def test_minigrid_one_hot_view_matches_the_raw_codes():
    """The argmax of each one-hot part, of the direction and of each cell, is the code of the raw view."""
    raw = gymnasium.make("MiniGrid-MemoryS7-v0")
    view = minigrid_view(gymnasium.make("MiniGrid-MemoryS7-v0"))
    for seed in range(3):
        observation, _ = raw.reset(seed=seed)
        bits, _ = view.reset(seed=seed)
        assert bits in view.observation_space
        assert bits[:4].argmax() == observation["direction"]
        cells = bits[4:].reshape(7, 7, 20)
        parts = [cells[..., :11], cells[..., 11:17], cells[..., 17:]]
        assert all((part.sum(axis=-1) == 1).all() for part in parts)
        np.testing.assert_array_equal(np.stack([part.argmax(-1) for part in parts], -1), observation["image"])


def test_changing_mission_raises():
    with pytest.raises(TypeError, match=r"mission.*wrapper_class"):
        make_vec_env("MiniGrid-Fetch-5x5-N2-v0", 1)


def test_wrapper_class_replaces_the_family_wrappers():
    def direction_only(env: gymnasium.Env) -> gymnasium.Env:
        return FilterObservation(env, ["direction"])

    env = make_vec_env("MiniGrid-Fetch-5x5-N2-v0", 1, wrapper_class=direction_only)
    assert env.observation_space == spaces.Dict({"direction": spaces.Discrete(4)})
