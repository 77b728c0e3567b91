"""Tests of the model and of acting: formula, history, spaces, states and errors."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rlxf.agents.decision_transformer import MaximumEntropy
from rlxf.data import Windows
from rlxf.envs import FaultyEnvironmentError
from rlxf.training import CheckpointError, NumericalError, linear, read_archive, write_archive
from rlxf.training.strict_json import dump_json, load_json
from tests.agents.common.test_checkpoint import put
from tests.agents.decision_transformer.test_resume import assert_resumes
from tests.agents.decision_transformer.worlds import ACTIONS, NESTED, OBSERVATIONS, VECTOR, some_trajectories
from tests.agents.mlp.worlds import AGENTS, LENGTHS, environment_rows, replayed, small_mlp

NAMES = tuple(AGENTS)


def slow_actions(agent, data):
    """Return the action for each step of Box data, computed from the formula, one step at a time."""
    weights = [layer for layer in agent.policy.modules() if isinstance(layer, nn.Linear)]
    rows = (data.observations - data.observation_mean) / data.observation_std
    actions = []
    for first, end in zip(data.offsets[:-1], data.offsets[1:], strict=True):
        for t in range(first, end):
            last = [rows[i] if i >= first else np.zeros(rows.shape[1]) for i in range(t + 1)]
            padded = [np.zeros(rows.shape[1])] * agent.context_length + last[first:]
            x = np.concatenate(padded[-agent.context_length :])
            if agent.return_conditioned:
                x = np.append(x, data.return_to_go[t] / agent.return_scale)
            for layer in weights[:-1]:
                x = np.maximum(layer.weight.detach().numpy() @ x + layer.bias.detach().numpy(), 0)
            u = np.tanh(weights[-1].weight.detach().numpy() @ x + weights[-1].bias.detach().numpy())
            low, high = data.action_space.low, data.action_space.high
            actions.append((low + high) / 2 + u * (high - low) / 2)
    return np.array(actions)


@pytest.mark.parametrize("context_length", [1, 3, 20])
@pytest.mark.parametrize("name", NAMES)
def test_actions_equal_the_formula(name, context_length):
    agent = small_mlp(name, context_length=context_length)
    expected = slow_actions(agent, agent.trajectories)
    np.testing.assert_allclose(replayed(agent, agent.trajectories), expected, atol=1e-4)
    assert len(np.unique(expected.round(3), axis=0)) > len(expected) / 2


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_mean_squared_error_of_scaled_actions(name):
    agent = small_mlp(name, context_length=3)
    data, steps = agent.trajectories, np.array([0, 5, 9, 20])
    batch = agent.windows(data).starting_at(steps)
    radius = (data.action_space.high - data.action_space.low) / 2
    difference = (slow_actions(agent, data)[steps] - data.actions[steps]) / radius
    loss = agent.policy.eval().losses(batch)["loss"].item()
    assert loss == pytest.approx(np.mean(difference**2), rel=1e-4)


@torch.no_grad()
def learned(agent, data):
    batch = Windows(data, 1, burn_in=agent.context_length - 1).starting_at(np.arange(data.steps))
    policy = agent.policy.eval()
    chosen = policy.act(policy.history(batch), batch.return_to_go[:, -1], deterministic=True).numpy()
    start = getattr(data.action_space, "start", 0)
    return chosen.reshape(data.steps, *(data.action_space.shape or ())) + start


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("actions", ACTIONS)
def test_acting_equals_learning_for_all_action_spaces(name, actions):
    agent = small_mlp(name, some_trajectories(action_space=ACTIONS[actions]), context_length=2)
    acted = replayed(agent, agent.trajectories)
    expected = learned(agent, agent.trajectories)
    if isinstance(agent.action_space, spaces.Box):
        expected = np.clip(expected, agent.action_space.low, agent.action_space.high)
    np.testing.assert_allclose(acted, expected, atol=1e-5)
    assert all(agent.action_space.contains(action) for action in acted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_acting_equals_learning_for_all_observation_spaces(name, observations):
    agent = small_mlp(name, some_trajectories(OBSERVATIONS[observations]), context_length=2)
    if observations == "nested":  # the random rows of the dataset encode no value of a Discrete
        one_hot = np.eye(4, dtype=np.float32)[np.arange(agent.trajectories.steps) % 4]
        agent.trajectories.observations[:, :4] = one_hot
    acted = replayed(agent, agent.trajectories)
    np.testing.assert_allclose(acted, learned(agent, agent.trajectories), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_single_observation_equals_a_batch_of_one(name):
    agent = small_mlp(name)
    batch = environment_rows(agent, agent.trajectories, np.array([5]))
    one = {key: value[0] for key, value in batch.items()} if isinstance(batch, dict) else batch[0]
    chosen, state = agent.predict(one)
    np.testing.assert_array_equal(chosen, agent.predict(batch)[0][0])
    assert state is None


def test_a_single_nested_observation_equals_a_batch_of_one():
    agent = small_mlp(trajectories=some_trajectories(NESTED))
    one = {"number": np.int64(2), "vector": np.ones(3, np.float32)}
    batch = {"number": np.array([2]), "vector": np.ones((1, 3), np.float32)}
    np.testing.assert_array_equal(agent.predict(one)[0], agent.predict(batch)[0][0])


@pytest.mark.parametrize("name", NAMES)
def test_the_start_of_an_episode_clears_the_history(name):
    agent = small_mlp(name, context_length=3)
    rows = environment_rows(agent, agent.trajectories, np.array([5, 6]))
    _, old = agent.predict(rows, None, np.array([True, True]))
    before = old.features.clone()
    fresh, _ = agent.predict(rows, None, np.array([True, True]))
    mixed, _ = agent.predict(rows, old, np.array([False, True]))
    assert (mixed[0] != fresh[0]).any()
    np.testing.assert_allclose(mixed[1], fresh[1], atol=1e-6)
    assert torch.equal(old.features, before)
    np.testing.assert_allclose(agent.predict(rows, old)[0][0], mixed[0], atol=1e-6)


def test_a_missing_state_warns_once():
    agent = small_mlp(context_length=2)
    rows = np.zeros((1, 3), np.float32)
    with pytest.warns(UserWarning, match="got no state, although episode_start marks"):
        agent.predict(rows, None, np.array([False]))
    small_mlp().predict(rows, None, np.array([False]))  # without history there is no state


@pytest.mark.parametrize(
    ("observation", "error", "message"),
    [
        (np.zeros(4), ValueError, "must have the shape of the dataset, .3,., got .4,."),
        (np.zeros((2, 2, 3)), ValueError, "the observation must have 1 axes, or 2 for several"),
        ({"observation": np.zeros(3)}, TypeError, "got a mapping: pass observations of the environment"),
        (np.full(3, np.nan), FaultyEnvironmentError, "the observation of environment 0 is nan at index 0"),
    ],
)
def test_wrong_observations_are_errors(observation, error, message):
    with pytest.raises(error, match=message):
        small_mlp().predict(observation)


@pytest.mark.parametrize(
    ("observation", "error", "message"),
    [
        (np.zeros(3), TypeError, "the observation must be of the space Dict"),
        ({"number": np.int64(1)}, TypeError, "the observation lacks 'vector', it has 'number'"),
        ({"number": np.int64(1), "vector": np.zeros((2, 3))}, ValueError, "some parts of the observation"),
        ({"number": np.int64(1), "vector": np.zeros(4)}, ValueError, "8 numbers, those of the dataset 7"),
        ({"number": np.int64(9), "vector": np.zeros(3)}, FaultyEnvironmentError, "environment 0"),
    ],
)
def test_wrong_nested_observations_are_errors(observation, error, message):
    with pytest.raises(error, match=message):
        small_mlp(trajectories=some_trajectories(NESTED)).predict(observation)


def test_wrong_states_are_errors():
    rows, starts = np.zeros((2, 3), np.float32), np.ones(2, bool)
    agent = small_mlp(context_length=2)
    _, longer = small_mlp(context_length=3).predict(rows, None, starts)
    _, state = agent.predict(rows, None, starts)
    with pytest.raises(ValueError, match="the state is of another agent"):
        agent.predict(rows, longer)
    with pytest.raises(ValueError, match="the state is of 2 environments, the observation of 1"):
        agent.predict(rows[:1], state)
    with pytest.raises(TypeError, match="state must be one that predict returned, got ndarray"):
        agent.predict(rows, rows)


def test_outputs_that_are_not_finite_are_errors():
    agent = small_mlp()
    with torch.no_grad():
        next(iter(agent.policy.body.parameters()))[0] = torch.nan
    with pytest.raises(NumericalError, match=r"the parameter .body\.0\.0\.weight. contains nan"):
        agent.predict(np.zeros((1, 3)))
    with pytest.raises(NumericalError, match=r"the parameter .body\.0\.0\.weight. contains nan"):
        agent.learn(1)


DROPOUT = {"dropout": 0.3, "context_length": 2}
RESUMED = {
    "default": {},
    "dropout": DROPOUT,
    "maximum entropy": {"objective": MaximumEntropy(0.3)},
    "schedule": {"learning_rate": linear(1e-2, 1e-3), "warmup_updates": None},
}


@pytest.mark.parametrize("settings", RESUMED)
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_run(name, settings, tmp_path):
    assert_resumes(lambda: small_mlp(name, **RESUMED[settings]), tmp_path, cut=4)


def test_a_resumed_run_on_the_best_episodes_is_bitwise_equal(tmp_path):
    assert_resumes(lambda: small_mlp(best=0.3, **DROPOUT), tmp_path, cut=4)


@pytest.mark.parametrize("actions", ["Box", "MultiDiscrete"])
@pytest.mark.parametrize("name", NAMES)
def test_files_preserve_settings_and_actions(name, actions, tmp_path):
    data = some_trajectories(action_space=ACTIONS[actions])
    settings = {"context_length": 2, "objective": MaximumEntropy(0.2), "learning_rate": linear(1e-3, 1e-4)}
    agent = small_mlp(name, data, **settings).learn(2)
    agent.save(tmp_path / "agent")
    loaded = AGENTS[name].load(tmp_path / "agent.zip", device="cpu")
    assert load_json(dump_json(loaded.config.to_json())) == load_json(dump_json(agent.config.to_json()))
    np.testing.assert_array_equal(replayed(loaded, data), replayed(agent, data))
    with pytest.raises(ValueError, match="the agent was loaded without data"):
        loaded.learn(1)
    AGENTS[name].load(tmp_path / "agent.zip", data, device="cpu").learn(1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_sizes", [10**9, 8]),
        ("hidden_sizes", [12, 8] * 100),
        ("hidden_sizes", [12, 0]),
        ("hidden_sizes", [12, True]),
        ("hidden_sizes", 12),
        ("hidden_sizes", [12]),
        ("context_length", 10**9),
        ("context_length", 2),
        ("dropout", 1.0),
        ("dropout", "0"),
        ("best", 0),
        ("best", 1.5),
        ("objective", {"name": "os"}),
        ("seed", -1),
    ],
)
def test_altered_settings_in_a_file_are_errors(name, value, tmp_path):
    small_mlp().save(tmp_path / "agent.zip")
    archive = read_archive(tmp_path / "agent.zip")
    documents = {"agent": put(archive.documents["agent"], ("settings", name), value)}
    write_archive(tmp_path / "altered.zip", documents, archive.tensors)
    with pytest.raises(CheckpointError):
        AGENTS["BehaviorCloning"].load(tmp_path / "altered.zip", device="cpu")


def test_a_file_of_another_agent_names_its_loader(tmp_path):
    small_mlp().save(tmp_path / "agent.zip")
    with pytest.raises(CheckpointError, match=r"a BehaviorCloning, which BehaviorCloning\.load loads"):
        AGENTS["ReturnConditionedMLP"].load(tmp_path / "agent.zip")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"hidden_sizes": 256}, TypeError, "hidden_sizes must be a sequence of widths such as"),
        ({"hidden_sizes": (256, 0)}, ValueError, "hidden_sizes must be at least 1, got 0"),
        ({"hidden_sizes": (2.5,)}, TypeError, "hidden_sizes"),
        ({"hidden_sizes": (1,) * 101}, ValueError, "hidden_sizes must be at most 100 numbers"),
        ({"dropout": 1.0}, ValueError, "dropout must be a finite number of at least 0 and less than 1, got"),
        ({"context_length": 0}, ValueError, "context_length must be an integer of at least 1, got 0"),
        ({"learning_rate": -1.0}, ValueError, "learning_rate must be finite and at least 0"),
        ({"net_arch": [64]}, TypeError, r"the network has the hidden layers hidden_sizes"),
        ({"n_envs": 4}, TypeError, "the agent learns from a dataset only, without environments"),
        ({"core": None}, TypeError, "takes no argument 'core'"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_arguments_are_errors(name, settings, error, message):
    with pytest.raises(error, match=message):
        AGENTS[name](some_trajectories(VECTOR, lengths=LENGTHS), device="cpu", **settings)


@pytest.mark.parametrize("name", NAMES)
def test_a_linear_policy_has_no_hidden_layer(name):
    agent = small_mlp(name, hidden_sizes=()).learn(2)
    assert len(agent.policy.body) == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_learns_a_rule_of_the_data(name):
    observations = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    rule = np.stack([0.5 + np.tanh(observations[:, 0]), 5 + 3 * np.sin(observations[:, 1])], axis=1)
    data = some_trajectories(
        lengths=(20,) * 10, observations=observations, actions=np.clip(rule, -0.9, 9.9).astype(np.float32)
    )
    agent = AGENTS[name](data, hidden_sizes=(32, 32), learning_rate=1e-2, seed=0, device="cpu").learn(150)
    assert np.abs(replayed(agent, data) - data.actions).mean() < 0.3
