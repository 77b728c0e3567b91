import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as check_env_sb3

from rlxf.envs import PreviousStep, TMaze, make_vec_env
from tests.envs.counters import Counter


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
