"""Tests of `replay`: actions, states and conditions equal those of acting step by step."""

import random
import warnings
from dataclasses import replace
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.vec_env import VecNormalize

from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.agents.common.actions import action_encoder
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.gtrxl.network_step import CompiledStep
from rlxf.data import DatasetError, load_trajectories
from rlxf.envs import make_vec_env
from rlxf.off_policy_evaluation import policy_replay, replay
from rlxf.off_policy_evaluation.networks import StepActions
from rlxf.off_policy_evaluation.policy_replay import logged_return_to_go
from tests.datasets import ID, record_cartpole, record_random

TINY_GTRXL = {"memory_length": 4, "n_steps": 8, "segment_length": 8, "batch_size": 16, "n_envs": 2}


@pytest.fixture
def data(minari_root):
    record_cartpole((6, 2, 9, 1))
    return load_trajectories(ID)


class FakeEnv(gymnasium.Env):
    """Environment with random observations of a space."""

    action_space = spaces.Discrete(2)

    def __init__(self, observation_space):
        self.observation_space = observation_space

    def reset(self, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {}


def gtrxl(env="CartPole-v1"):
    return GTrXLPPO("MlpGTrXLPolicy", env, device="cpu", seed=0, **TINY_GTRXL)


def transformer(data, **options):
    core = decision_transformer(width=8, layers=1)
    return DecisionTransformer(data, context_length=4, core=core, device="cpu", seed=0, **options)


def test_rewards_of_other_data_are_validated(data):
    rewards = np.full_like(data.rewards, np.nan)
    with pytest.raises(DatasetError, match=r"the reward of step 0 .* is nan"):
        replay(transformer(data), replace(data, rewards=rewards), target_return=20.0)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_decision_transformer_observes_logged_actions_and_returns(data, deterministic):
    agent = transformer(data)
    result = replay(agent, data, target_return=20.0, deterministic=deterministic)
    for episode in range(data.episodes):
        state, to_go = None, 20.0
        for t, step in enumerate(range(*data.offsets[episode : episode + 2])):
            observation = {
                "observation": data.observations[[step]],
                "return_to_go": np.array([[to_go]], np.float32),
                "previous_action": data.actions[[step - 1]] if t else np.zeros(1, np.int64),
                "time_step": np.array([[t]]),
            }
            logits, state = agent.action_logits(observation, state)
            expected = logits[0].argmax() if deterministic else logits[0].softmax(0)
            torch.testing.assert_close(result.actions[step], expected, atol=1e-6, rtol=0)
            assert result.return_to_go[step] == pytest.approx(to_go)
            to_go -= float(data.rewards[step])
    if deterministic:
        np.testing.assert_array_equal(result.probability, result.actions.numpy() == data.actions)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_recurrent_agent_observes_logged_actions(data, deterministic):
    agent = gtrxl()
    result = replay(agent, data, deterministic=deterministic)
    for episode in range(data.episodes):
        state = None
        for step in range(*data.offsets[episode : episode + 2]):
            start = np.array([step == data.offsets[episode]])
            logits, state = agent.policy.action_logits(data.observations[[step]], state, start)
            state = agent.policy.observe_action(state, torch.tensor(data.actions[[step]]))
            expected = logits[0].softmax(0)
            expected = expected.argmax() if deterministic else expected
            torch.testing.assert_close(result.actions[step], expected, atol=1e-5, rtol=1e-5)


def test_a_compiled_step_is_used_for_one_number_of_episodes(data, monkeypatch):
    numbers = []
    monkeypatch.setattr(CompiledStep, "_step_for", lambda step, policy, obs, *_: numbers.append(len(obs)))
    compiled = GTrXLPPO("MlpGTrXLPolicy", "CartPole-v1", device="cpu", seed=0, compile=True, **TINY_GTRXL)
    torch.testing.assert_close(replay(compiled, data).actions, replay(gtrxl(), data).actions)
    assert set(numbers) == {data.episodes}


def test_batches_of_episodes_do_not_change_the_result(data, monkeypatch):
    agent = transformer(data)
    one = replay(agent, data, 9.0, deterministic=False).actions
    monkeypatch.setattr("rlxf.off_policy_evaluation.policy_replay.EPISODES_PER_BATCH", 1)
    torch.testing.assert_close(replay(agent, data, 9.0, deterministic=False).actions, one)


def test_agents_of_sb3_give_probabilities_if_they_have_them(data):
    policy_gradient = PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu")
    stochastic = replay(policy_gradient, data, deterministic=False)
    observations = torch.from_numpy(np.array(data.observations))
    expected = policy_gradient.policy.get_distribution(observations).distribution.probs
    torch.testing.assert_close(stochastic.actions, expected.detach())
    logged = expected.detach().numpy()[np.arange(data.steps), data.actions]
    np.testing.assert_allclose(stochastic.probability, logged, rtol=1e-6)
    q_learner = DQN("MlpPolicy", "CartPole-v1", buffer_size=10, device="cpu")
    assert replay(q_learner, data).probability is not None
    assert replay(q_learner, data, deterministic=False).probability is None


def test_an_agent_observes_logged_steps_with_the_normalization_of_its_training(data):
    env = VecNormalize(make_vec_env("CartPole-v1", 2))
    env.obs_rms.mean, env.obs_rms.var = np.full(4, 0.5), np.array([1.0, 4.0, 0.1, 1.0])
    agent = PPO("MlpPolicy", env, n_steps=8, batch_size=8, device="cpu")
    normalized = torch.from_numpy(env.normalize_obs(np.array(data.observations)))
    expected = agent.policy.get_distribution(normalized).distribution.probs
    torch.testing.assert_close(replay(agent, data, deterministic=False).actions, expected.detach())


class StatefulAgent:
    """Agent whose state, an array (E,), cannot select rows: it counts the steps of each episode."""

    def predict(self, observation, state=None, episode_start=None, deterministic=True):
        count = np.zeros(len(observation), np.int64) if state is None else state + 1
        return count % 2, count


def test_images_of_a_dict_are_replayed_with_the_axes_of_the_environment(minari_root):
    """The agent has channels in the first axis, its environment and the data in the last one."""
    image = spaces.Box(0, 255, (36, 36, 3), np.uint8)
    view = spaces.Dict(image=image, speed=spaces.Box(-1, 1, (2,)))
    dataset = record_random((4, 3), observation_space=view, action_space=spaces.Discrete(2))
    env = make_vec_env(partial(FakeEnv, view), 2)
    agent = GTrXLPPO("MultiInputPolicy", env, device="cpu", seed=0, **TINY_GTRXL)
    chosen, state = [], None
    for episode in dataset.iterate_episodes():
        for step in range(len(episode.actions)):
            observation = {key: x[step : step + 1] for key, x in episode.observations.items()}
            action, state = agent.predict(observation, state, np.array([step == 0]), deterministic=True)
            chosen.append(action.item())
    assert replay(agent, load_trajectories(ID)).actions.tolist() == chosen


def test_states_that_cannot_select_rows_keep_all_episodes(data):
    chosen = replay(StatefulAgent(), data).actions
    expected = np.concatenate([np.arange(length) % 2 for length in data.lengths])
    assert chosen.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "space", [spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2), spaces.Discrete(3, start=5)]
)
def test_probability_of_actions_with_several_parts(minari_root, space):
    record_random((4, 3), action_space=space)
    data = load_trajectories(ID)

    class Constant:
        def predict(self, observation, state=None, episode_start=None, deterministic=True):
            return np.stack([fixed] * len(observation)), None

    fixed = space.sample()
    rows = data.actions.reshape(data.steps, -1) + getattr(space, "start", np.zeros(1, np.int64))
    same = (rows == np.ravel(fixed)).all(axis=1)
    np.testing.assert_array_equal(replay(Constant(), data).probability, same.astype(float))


def test_box_actions_have_no_probability(minari_root):
    record_random((4, 3), action_space=spaces.Box(-2, 2, (2,), np.float32))
    data = load_trajectories(ID)
    result = replay(transformer(data), data, 1.0)
    assert result.probability is None
    assert result.actions.shape == (7, 2)
    assert (result.actions.abs() <= 1).all()


def test_return_to_go_is_the_target_minus_earlier_rewards(data):
    returns = logged_return_to_go(data, 7.0)
    for start, end in zip(data.offsets, data.offsets[1:], strict=False):
        expected = 7.0 - np.append(0, np.cumsum(data.rewards[start : end - 1].astype(np.float64)))
        np.testing.assert_allclose(returns[start:end], expected, atol=1e-6)


def test_random_numbers_of_the_caller_are_not_used(data):
    agent = gtrxl()
    before = torch.get_rng_state()
    replay(agent, data, deterministic=False)
    assert torch.equal(torch.get_rng_state(), before)


def generator_states(space):
    """Return the states of the global generators of Python and NumPy, and of an action space."""
    name, keys, *place = np.random.get_state()  # noqa: NPY002  # the generator that SB3 draws from
    return random.getstate(), name, keys.tolist(), place, space.np_random.bit_generator.state


def test_random_actions_of_dqn_repeat_and_restore_all_generators(data):
    """DQN draws from NumPy's global generator and from its action space."""
    agent = DQN("MlpPolicy", "CartPole-v1", buffer_size=10, device="cpu", seed=0)
    agent.exploration_rate = 0.5
    space = agent.action_space
    before = generator_states(space)
    one, same, other = (replay(agent, data, deterministic=False, seed=seed).actions for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert agent.action_space is space
    assert generator_states(space) == before


@pytest.mark.parametrize("space", [spaces.Discrete(7, start=2), spaces.MultiDiscrete([2, 3])])
def test_chosen_actions_are_not_encoded(minari_root, space):
    """Inputs of networks, one number for each possible choice, are made in batches only."""

    class Constant:
        def predict(self, observation, state=None, episode_start=None, deterministic=True):
            return np.stack([fixed] * len(observation)), None

    record_random((4, 3), action_space=space)
    data, fixed = load_trajectories(ID), space.sample()
    actions = replay(Constant(), data).actions
    assert actions.dtype == torch.int64
    assert actions.shape == data.actions.shape
    steps, encoder = torch.tensor([[0, 5], [2, 2]]), action_encoder(space)
    encoded = StepActions(actions, space)(steps)
    torch.testing.assert_close(encoded, encoder(actions[steps]))
    assert encoded.shape == (2, 2, StepActions(actions, space).width)
    logged = torch.from_numpy(np.array(data.actions))
    torch.testing.assert_close(StepActions.logged(data)(steps), encoder(logged[steps]))


def test_unsuitable_agents_are_rejected(data):
    with pytest.raises(DatasetError, match="the agent does not fit dataset test/small-v0: observation space"):
        replay(gtrxl("rlxf/TMaze-v0"), data)
    with pytest.raises(TypeError, match="agent must have predict"):
        replay(None, data)
    with pytest.raises(ValueError, match="the agent takes no target_return: got 5"):
        replay(gtrxl(), data, 5.0)
    with pytest.raises(ValueError, match="the agent needs a target_return: got None"):
        replay(transformer(data), data)
    env = make_vec_env("CartPole-v1", 2)
    persistent = GTrXLPPO(
        "MlpGTrXLPolicy", env, persist_memory_across_episodes=True, **(TINY_GTRXL | {"n_envs": 2})
    )
    with pytest.raises(ValueError, match="persists across episodes"):
        replay(persistent, data)


@pytest.mark.parametrize(
    ("most", "progress_bar", "warns"), [(10, False, True), (11, False, False), (10, True, False)]
)
def test_many_successive_calls_warn(data, monkeypatch, no_progress_bars, most, progress_bar, warns):
    """Episodes of 9, 6, 2 and 1 steps, two at a time, need 9 + 2 calls."""
    monkeypatch.setattr(policy_replay, "EPISODES_PER_BATCH", 2)
    monkeypatch.setattr(policy_replay, "MANY_CALLS", most)
    agent = transformer(data)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        replay(agent, data, target_return=20.0, progress_bar=progress_bar)
    messages = [str(each.message) for each in found]
    assert (
        any("with 11 calls of predict" in each and "pass progress_bar=True" in each for each in messages)
        == warns
    )
