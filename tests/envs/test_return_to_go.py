"""`ReturnToGo`, compared with the same quantities computed for one environment at a time."""

from copy import deepcopy

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from rlxf.data import observation_encoder
from rlxf.envs import as_vec_env
from rlxf.envs.return_to_go import ReturnToGo, encoded_observation_space, is_return_conditioned
from tests.envs.small_envs import Counter

TARGETS = [100.0, -7.5]


class Dice(gymnasium.Env):
    """Environment with any spaces, random observations and rewards, and episodes that end at random."""

    def __init__(self, action_space=None, observation_space=None):
        self.observation_space = deepcopy(observation_space) or spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = action_space or spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        terminated, truncated = (bool(chance < 0.15) for chance in self.np_random.random(2))
        return self.observation_space.sample(), float(self.np_random.normal()), terminated, truncated, {}


def return_to_go_env(make, targets=TARGETS):
    return ReturnToGo(DummyVecEnv([make] * len(targets)), targets)


def sampled(env, steps, seed=0):
    """Yield each step of random play: the observation, the actions and the results."""
    env.action_space.seed(seed)
    env.seed(seed)
    obs = env.reset()
    for _ in range(steps):
        actions = np.array([env.action_space.sample() for _ in range(env.num_envs)])
        before, (obs, rewards, dones, infos) = obs, env.step(actions)
        yield before, actions, obs, rewards, dones, infos


ACTIONS = {
    "discrete": spaces.Discrete(4),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "multi-binary": spaces.MultiBinary(3),
    "box": spaces.Box(-2, 2, (3,), np.float32),
    "box without zero": spaces.Box(1, 2, (2,), np.float32),
}


@pytest.mark.parametrize("action_space", ACTIONS.values(), ids=ACTIONS)
def test_each_row_matches_its_own_episode(action_space):
    env = return_to_go_env(lambda: Dice(action_space))
    rewards_of, last = [[], []], [None, None]
    ends = 0
    for before, actions, obs, rewards, dones, infos in sampled(env, 80):
        for i in range(2):
            check_row(before, i, rewards_of[i], last[i], action_space)
            rewards_of[i].append(float(rewards[i]))
            last[i] = actions[i]
            if dones[i]:
                ends += 1
                check_row(
                    batch_of(infos[i]["terminal_observation"]), 0, rewards_of[i], last[i], action_space, i
                )
                rewards_of[i], last[i] = [], None
            check_row(obs, i, rewards_of[i], last[i], action_space)
    assert ends > 10


def check_row(obs, row, rewards, action, action_space, env=None):
    target = TARGETS[row if env is None else env]
    assert obs["return_to_go"][row] == pytest.approx(target - sum(rewards), abs=1e-4)
    assert obs["time_step"][row].tolist() == [len(rewards)]
    zeros = np.zeros(action_space.shape)
    np.testing.assert_array_equal(obs["previous_action"][row], zeros if action is None else action)


def batch_of(observation):
    return {key: np.asarray(value)[None] for key, value in observation.items()}


@pytest.mark.parametrize("action_space", ACTIONS.values(), ids=ACTIONS)
def test_observations_are_in_the_observation_space(action_space):
    env = return_to_go_env(lambda: Dice(action_space))
    for _, _, obs, _, dones, infos in sampled(env, 30):
        for i in range(2):
            assert env.observation_space.contains({key: value[i] for key, value in obs.items()})
            if dones[i]:
                assert env.observation_space.contains(infos[i]["terminal_observation"])


def test_inner_spaces_are_those_of_the_environment():
    dice = Dice(ACTIONS["box"])
    space = return_to_go_env(lambda: Dice(ACTIONS["box"])).observation_space
    assert space["observation"] == dice.observation_space
    assert space["previous_action"] == dice.action_space
    assert is_return_conditioned(space)
    assert not is_return_conditioned(dice.observation_space)


def test_inner_results_are_unchanged():
    """Observations, rewards, done flags and infos equal those of the environments without the wrapper."""
    plain = sampled(DummyVecEnv([Counter] * 2), 60)
    for (_, _, obs, rewards, dones, infos), expected in zip(
        sampled(return_to_go_env(Counter), 60), plain, strict=True
    ):
        np.testing.assert_array_equal(obs["observation"], expected[2])
        np.testing.assert_array_equal(rewards, expected[3])
        np.testing.assert_array_equal(dones, expected[4])
        for info, expected_info in zip(infos, expected[5], strict=True):
            assert info["TimeLimit.truncated"] == expected_info["TimeLimit.truncated"]
            assert info.keys() == expected_info.keys()
            if "terminal_observation" in expected_info:
                last = info["terminal_observation"]["observation"]
                np.testing.assert_array_equal(last, expected_info["terminal_observation"])


@pytest.mark.parametrize(
    "space",
    [
        Counter(as_dict=True).observation_space,
        spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2, 2), np.float32)]),
    ],
    ids=["dict", "tuple"],
)
def test_dict_and_tuple_observations_are_flattened(space):
    env = ReturnToGo(DummyVecEnv([lambda: Dice(observation_space=space)]), 1.0)
    plain = DummyVecEnv([lambda: Dice(observation_space=space)])
    encode = observation_encoder(space)
    for (_, _, obs, _, dones, infos), expected in zip(sampled(env, 40), sampled(plain, 40), strict=True):
        np.testing.assert_array_equal(obs["observation"], encode(expected[2]))
        assert env.observation_space["observation"].contains(obs["observation"][0])
        if dones[0]:
            last = spaces.flatten(space, expected[5][0]["terminal_observation"])
            np.testing.assert_allclose(infos[0]["terminal_observation"]["observation"], last, rtol=1e-6)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2,), np.float32),
        spaces.Discrete(5),
        spaces.Box(0, 255, (36, 36, 3), np.uint8),
        Counter(as_dict=True).observation_space,
    ],
    ids=["vector", "discrete", "image", "dict"],
)
def test_encoder_of_the_wrapped_observation_equals_that_of_the_data(space):
    env = ReturnToGo(DummyVecEnv([lambda: Dice(observation_space=space)]), 0.0)
    plain = DummyVecEnv([lambda: Dice(observation_space=space)])
    env.seed(3), plain.seed(3)
    encoded = observation_encoder(encoded_observation_space(space))(env.reset()["observation"])
    np.testing.assert_array_equal(encoded, observation_encoder(space)(plain.reset()))


def test_new_target_applies_from_the_next_episode():
    env = return_to_go_env(Counter, [5.0, 5.0])
    started = [5.0, 5.0]
    for step, (_, _, obs, _, dones, _) in enumerate(sampled(env, 60)):
        if dones.any() and step > 20:
            env.target_return = 9.0
        for i in np.flatnonzero(dones):
            assert obs["return_to_go"][i] == started[i]
        started = env.target_return.tolist()
    assert started == [9.0, 9.0]


def test_earlier_observations_do_not_change():
    env = return_to_go_env(Counter)
    first = env.reset()
    kept = {key: value.copy() for key, value in first.items()}
    env.step(np.array([1, 2]))
    assert all((first[key] == kept[key]).all() for key in kept)


def test_many_small_rewards_are_accumulated_exactly():
    """float32 cannot add 0.125 to numbers above 2e6, so returns are accumulated in float64."""

    class SmallRewards(Counter):
        def step(self, action):
            return self._observe(0), 0.125, False, False, {}

    env = ReturnToGo(DummyVecEnv([SmallRewards]), 2.0**24)
    env.reset()
    for _ in range(800):
        obs, *_ = env.step(np.zeros(1, np.int64))
    assert obs["return_to_go"].item() == 2.0**24 - 100


def test_filler_rows_are_not_counted_as_steps():
    env = ReturnToGo(
        as_vec_env(SyncVectorEnv([Counter] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)), TARGETS
    )
    fillers = 0
    for before, _, obs, rewards, _, infos in sampled(env, 60):
        for i, info in enumerate(infos):
            if info.get("filler"):
                fillers += 1
                assert obs["time_step"][i] == 0
                assert obs["return_to_go"][i] == TARGETS[i]
                assert not obs["previous_action"][i].any()
            elif "terminal_observation" in info:
                expected = before["return_to_go"][i] - rewards[i]
                assert info["terminal_observation"]["return_to_go"] == pytest.approx(expected)
    assert fillers > 5


def test_sb3_policy_trains_and_is_evaluated():
    env = VecMonitor(return_to_go_env(Counter))
    agent = PPO("MultiInputPolicy", env, n_steps=16, batch_size=32, n_epochs=1, seed=0, device="cpu")
    mean, _ = evaluate_policy(agent.learn(32), env, n_eval_episodes=4)
    assert np.isfinite(mean)


@pytest.mark.parametrize("target", [np.nan, np.inf, [1.0], [[1.0, 2.0]], [1.0, 2.0, 3.0]])
def test_invalid_target_raises(target):
    with pytest.raises(ValueError, match=r"target_return must be a finite number or 2 of them.*got"):
        ReturnToGo(DummyVecEnv([Counter] * 2), target)


def test_wrapping_twice_raises():
    with pytest.raises(ValueError, match="set its target_return"):
        ReturnToGo(return_to_go_env(Counter), 1.0)


def test_observation_that_cannot_be_flattened_raises():
    mixed = spaces.Dict(
        {"camera": spaces.Box(0, 255, (84, 84, 3), np.uint8), "speed": spaces.Box(0, 1, (1,))}
    )
    with pytest.raises(TypeError, match=r"\['camera'\]"):
        ReturnToGo(DummyVecEnv([lambda: Dice(observation_space=mixed)]), 1.0)


def test_single_environment_raises():
    with pytest.raises(TypeError, match=r"needs a VecEnv, got Counter: .*make_vec_env\(lambda: env, 1\)"):
        ReturnToGo(Counter(), 20)


def test_vector_environment_of_gymnasium_raises():
    with pytest.raises(TypeError, match=r"needs a VecEnv, got SyncVectorEnv: pass rlxf.envs.as_vec_env"):
        ReturnToGo(SyncVectorEnv([Counter]), 20)
