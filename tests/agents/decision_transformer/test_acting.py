"""Tests of `predict`: acting equals the training forward pass, and the state is immutable."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlxf.data import Windows
from rlxf.envs.spaces import map_parts
from tests.agents.decision_transformer.worlds import (
    ACTIONS,
    CORES,
    LENGTHS,
    NESTED,
    OBSERVATIONS,
    K,
    replayed,
    shown,
    small_agent,
    some_trajectories,
)

LONGEST = max(LENGTHS)


@torch.no_grad()
def training_pass(agent, data):
    """Return the model's action for each step as the last of the K steps (and burn-in) up to it."""
    agent.policy.eval()
    episode = np.repeat(np.arange(data.episodes), data.lengths)
    starts = np.maximum(np.arange(data.steps) - K + 1, data.offsets[episode])
    windows = Windows(data, K, burn_in=agent.policy.burn_in_steps)
    latent = []
    for step, start in enumerate(starts):
        batch = windows.starting_at([start])
        y = agent.policy.outputs(agent.policy.steps(batch))
        until_end = min(start + K, data.offsets[episode[step] + 1]) - 1 - step
        latent.append(y[0, y.shape[1] - 1 - until_end])
    chosen = agent.policy.loss.head.choose(torch.stack(latent), deterministic=True)
    start = getattr(data.action_space, "start", 0)
    return chosen.numpy().reshape(data.steps, *(data.action_space.shape or ())) + start


def assert_same_actions(acted, learned, space):
    if acted.dtype.kind == "f":
        learned = np.clip(learned, space.low, space.high)
    np.testing.assert_allclose(acted, learned, atol=1e-5)


@pytest.mark.parametrize("core", CORES)
def test_acting_equals_learning(core):
    agent = small_agent(core=CORES[core])
    acted = replayed(agent, agent.trajectories)
    assert_same_actions(acted, training_pass(agent, agent.trajectories), agent.action_space)
    assert len(np.unique(acted.round(3), axis=0)) > len(acted) / 2, (
        "the actions do not vary enough for a meaningful test"
    )


@pytest.mark.parametrize("actions", ACTIONS)
def test_acting_equals_learning_for_all_action_spaces(actions):
    agent = small_agent(some_trajectories(action_space=ACTIONS[actions]))
    acted = replayed(agent, agent.trajectories)
    assert_same_actions(acted, training_pass(agent, agent.trajectories), agent.action_space)
    assert all(agent.action_space.contains(action) for action in acted)


@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_acting_equals_learning_for_all_observation_spaces(observations):
    agent = small_agent(some_trajectories(OBSERVATIONS[observations]))
    acted = replayed(agent, agent.trajectories)
    assert_same_actions(acted, training_pass(agent, agent.trajectories), agent.action_space)


def test_acting_equals_learning_with_a_context_longer_than_any_episode():
    agent = small_agent(context_length=LONGEST + 5)
    windows = Windows(agent.trajectories, LONGEST + 5)
    batch = windows.starting_at(agent.trajectories.offsets[:-1])
    with torch.no_grad():
        y = agent.policy.eval().outputs(agent.policy.steps(batch))[batch.mask]
        learned = agent.policy.loss.head.choose(y, deterministic=True).numpy()
    assert_same_actions(replayed(agent, agent.trajectories), learned, agent.action_space)


@pytest.mark.parametrize(("age", "core", "reach"), [(1, "published", K - 1), (3, "memory", K + 2)])
def test_an_observation_affects_actions_as_far_as_context_and_memory_reach(age, core, reach):
    agent = small_agent(some_trajectories(lengths=(20,)), core=CORES[core])
    data = agent.trajectories
    plain, other = (first_episode_actions(agent, data, changed) for changed in (None, age))
    difference = np.abs(plain - other).max(axis=1)
    assert (difference[age : age + reach + 1] > 1e-5).all()
    assert (difference[age + reach + 1 :] == 0).all()


def first_episode_actions(agent, data, changed):
    """Return the actions of the first episode, with a changed observation at step ``changed``."""
    state, actions = None, []
    for t in range(data.lengths[0]):
        observation = shown(data, np.array([t]))
        observation["observation"] = observation["observation"] + (2.0 if t == changed else 0.0)
        action, state = agent.predict(observation, state)
        actions.append(action[0])
    return np.stack(actions)


def test_episode_start_resets_the_context():
    agent = small_agent()
    data = agent.trajectories
    _, old = agent.predict(shown(data, np.array([3, 4])))
    observation = shown(data, np.array([7, 8]))
    fresh, _ = agent.predict(observation)
    again, _ = agent.predict(observation, old, episode_start=np.array([True, True]))
    np.testing.assert_array_equal(fresh, again)
    differing, _ = agent.predict(observation, old, episode_start=np.array([False, True]))
    assert (differing[0] != fresh[0]).any()
    np.testing.assert_allclose(differing[1], fresh[1], atol=1e-6)


def test_time_step_0_resets_the_context():
    agent = small_agent()
    observation = shown(agent.trajectories, np.array([0, 10]))
    _, old = agent.predict(shown(agent.trajectories, np.array([8, 9])))
    np.testing.assert_array_equal(agent.predict(observation, old)[0][0], agent.predict(observation)[0][0])


def test_predict_does_not_modify_the_given_state():
    agent = small_agent()
    _, state = agent.predict(shown(agent.trajectories, np.array([3, 12])))
    before = [part.clone() for part in vars(state).values()]
    agent.predict(shown(agent.trajectories, np.array([4, 13])), state, np.array([False, True]))
    assert all(map(torch.equal, before, vars(state).values()))


def test_a_single_environment_needs_no_batch_axis():
    agent = small_agent()
    observation = shown(agent.trajectories, np.array([4]))
    batched, _ = agent.predict(observation)
    single, _ = agent.predict({key: value[0] for key, value in observation.items()})
    np.testing.assert_array_equal(single, batched[0])


def test_images_may_be_channels_first():
    agent = small_agent(some_trajectories(OBSERVATIONS["image"]))
    observation = shown(agent.trajectories, np.array([4]))
    channels_first = observation | {"observation": np.moveaxis(observation["observation"], -1, 1)}
    np.testing.assert_array_equal(agent.predict(channels_first)[0], agent.predict(observation)[0])


NESTED_SPACES = {"Dict": NESTED, "Tuple": spaces.Tuple(NESTED.values())}


@pytest.mark.parametrize("space", NESTED_SPACES.values(), ids=NESTED_SPACES)
def test_nested_observations_act_as_their_vectors(space):
    agent = small_agent(some_trajectories(space))
    encoder, steps = agent.trajectories.encoder, np.array([4, 9])
    nested = encoder.decode(agent.trajectories.observations[steps])
    given = shown(agent.trajectories, steps) | {"observation": nested}
    expected, _ = agent.predict(given | {"observation": encoder(nested)})
    np.testing.assert_array_equal(agent.predict(given)[0], expected)
    single, _ = agent.predict(map_parts(given, lambda part: part[0]))
    np.testing.assert_allclose(single, expected[0], atol=1e-5)


@pytest.mark.parametrize("space", NESTED_SPACES.values(), ids=NESTED_SPACES)
@pytest.mark.parametrize("sequence", [tuple, list])
def test_flat_vectors_of_nested_observations_may_be_sequences(space, sequence):
    agent = small_agent(some_trajectories(space))
    given = {key: value[0] for key, value in shown(agent.trajectories, np.array([4])).items()}
    vector = agent.trajectories.observations[4]
    expected, _ = agent.predict(given | {"observation": vector})
    actual, _ = agent.predict(given | {"observation": sequence(vector.tolist())})
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "space",
    [NESTED_SPACES["Tuple"], spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])],
    ids=["array", "numbers"],
)
def test_observations_of_a_tuple_may_be_lists(space):
    agent = small_agent(some_trajectories(space))
    encoder = agent.trajectories.encoder
    nested = encoder.decode(agent.trajectories.observations[[4]])
    given = {key: value[0] for key, value in shown(agent.trajectories, np.array([4])).items()}
    single = [part[0] for part in nested]
    expected, _ = agent.predict(given | {"observation": encoder(nested)[0]})
    for value in (single, tuple(single), [np.asarray(part).tolist() for part in single]):
        np.testing.assert_array_equal(agent.predict(given | {"observation": value})[0], expected)


@pytest.mark.parametrize(
    ("observation", "error", "message"),
    [
        ({"vector": np.zeros(3)}, TypeError, "the observation lacks 'number', it has 'vector'"),
        ({"number": 9, "vector": np.zeros(3)}, ValueError, r"environment 0 is \[9\], outside of Discrete"),
        ({"number": [1], "vector": np.zeros((1, 3))}, ValueError, "observation and return_to_go must both"),
    ],
)
def test_wrong_nested_observations_are_named(observation, error, message):
    agent = small_agent(some_trajectories(NESTED))
    single = {key: value[0] for key, value in shown(agent.trajectories, np.array([4])).items()}
    with pytest.raises(error, match=message):
        agent.predict(single | {"observation": observation})


def test_predict_disables_dropout():
    agent = small_agent(core=CORES["published with dropout"])
    agent.policy.train()
    observation = shown(agent.trajectories, np.array([4]))
    np.testing.assert_array_equal(agent.predict(observation)[0], agent.predict(observation)[0])


def test_samples_vary_and_the_most_likely_action_does_not():
    agent = small_agent(some_trajectories(action_space=ACTIONS["Discrete"]))
    observation = shown(agent.trajectories, np.full(200, 4))
    assert len(set(agent.predict(observation)[0])) == 1
    assert len(set(agent.predict(observation, deterministic=False)[0])) > 1
