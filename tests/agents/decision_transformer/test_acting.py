"""`predict` step by step gives what the training pass gives, and its state is a value."""

import numpy as np
import pytest
import torch

from rlxf.envs.trajectories import Windows
from tests.agents.decision_transformer.worlds import (
    ACTIONS,
    CORES,
    LENGTHS,
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
    """What the model gives for each step as the last one of the K (and burn-in) up to it."""
    agent.policy.eval()
    episode = np.repeat(np.arange(data.episodes), data.lengths)
    starts = np.maximum(np.arange(data.steps) - K + 1, data.offsets[episode])
    windows = Windows(data, K, burn_in=agent.policy.remembered)
    latent = []
    for step, start in enumerate(starts):
        batch = windows.starting_at([start])
        y = agent.policy.read(agent.policy.steps(batch))
        until_end = min(start + K, data.offsets[episode[step] + 1]) - 1 - step
        latent.append(y[0, y.shape[1] - 1 - until_end])
    chosen = agent.policy.loss.head.choose(torch.stack(latent), deterministic=True)
    start = getattr(data.action_space, "start", 0)
    return chosen.numpy().reshape(data.steps, *(data.action_space.shape or ())) + start


def check_same(acted, learned, space):
    if acted.dtype.kind == "f":
        learned = np.clip(learned, space.low, space.high)
    np.testing.assert_allclose(acted, learned, atol=1e-5)


@pytest.mark.parametrize("core", CORES)
def test_step_by_step_gives_what_the_training_pass_gives(core):
    agent = small_agent(core=CORES[core])
    acted = replayed(agent, agent.trajectories)
    check_same(acted, training_pass(agent, agent.trajectories), agent.action_space)
    assert len(np.unique(acted.round(3), axis=0)) > len(acted) / 2, (
        "all actions are alike: nothing was tested"
    )


@pytest.mark.parametrize("actions", ACTIONS)
def test_so_it_does_for_all_actions(actions):
    agent = small_agent(some_trajectories(action_space=ACTIONS[actions]))
    acted = replayed(agent, agent.trajectories)
    check_same(acted, training_pass(agent, agent.trajectories), agent.action_space)
    assert all(agent.action_space.contains(action) for action in acted)


@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_so_it_does_for_all_observations(observations):
    agent = small_agent(some_trajectories(OBSERVATIONS[observations]))
    acted = replayed(agent, agent.trajectories)
    check_same(acted, training_pass(agent, agent.trajectories), agent.action_space)


def test_so_it_does_when_the_context_is_longer_than_any_episode():
    agent = small_agent(context_length=LONGEST + 5)
    windows = Windows(agent.trajectories, LONGEST + 5)
    batch = windows.starting_at(agent.trajectories.offsets[:-1])
    with torch.no_grad():
        y = agent.policy.eval().read(agent.policy.steps(batch))[batch.mask]
        learned = agent.policy.loss.head.choose(y, deterministic=True).numpy()
    check_same(replayed(agent, agent.trajectories), learned, agent.action_space)


@pytest.mark.parametrize(("age", "core", "reach"), [(1, "published", K - 1), (3, "memory", K + 2)])
def test_what_was_seen_is_remembered_as_long_as_the_context_and_the_memory(age, core, reach):
    agent = small_agent(some_trajectories(lengths=(20,)), core=CORES[core])
    data = agent.trajectories
    plain, other = (play(agent, data, changed) for changed in (None, age))
    far = np.abs(plain - other).max(axis=1)
    assert (far[age : age + reach + 1] > 1e-5).all()
    assert (far[age + reach + 1 :] == 0).all()


def play(agent, data, changed):
    """Actions of the first episode; the observation of step ``changed`` is another one."""
    state, actions = None, []
    for t in range(data.lengths[0]):
        seen = shown(data, np.array([t]))
        seen["observation"] = seen["observation"] + (2.0 if t == changed else 0.0)
        action, state = agent.predict(seen, state)
        actions.append(action[0])
    return np.stack(actions)


def test_an_episode_starts_as_if_nothing_had_been():
    agent = small_agent()
    data = agent.trajectories
    _, old = agent.predict(shown(data, np.array([3, 4])))
    seen = shown(data, np.array([7, 8]))
    fresh, _ = agent.predict(seen)
    again, _ = agent.predict(seen, old, episode_start=np.array([True, True]))
    np.testing.assert_array_equal(fresh, again)
    differing, _ = agent.predict(seen, old, episode_start=np.array([False, True]))
    assert (differing[0] != fresh[0]).any()
    np.testing.assert_allclose(differing[1], fresh[1], atol=1e-6)


def test_time_step_0_starts_an_episode_without_being_told():
    agent = small_agent()
    seen = shown(agent.trajectories, np.array([0, 10]))
    _, old = agent.predict(shown(agent.trajectories, np.array([8, 9])))
    np.testing.assert_array_equal(agent.predict(seen, old)[0][0], agent.predict(seen)[0][0])


def test_a_state_that_was_given_stays_as_it_was():
    agent = small_agent()
    _, state = agent.predict(shown(agent.trajectories, np.array([3, 12])))
    before = [part.clone() for part in vars(state).values()]
    agent.predict(shown(agent.trajectories, np.array([4, 13])), state, np.array([False, True]))
    assert all(map(torch.equal, before, vars(state).values()))


def test_one_environment_without_an_axis_for_it():
    agent = small_agent()
    seen = shown(agent.trajectories, np.array([4]))
    batched, _ = agent.predict(seen)
    single, _ = agent.predict({key: value[0] for key, value in seen.items()})
    np.testing.assert_array_equal(single, batched[0])


def test_images_may_have_their_channels_first():
    agent = small_agent(some_trajectories(OBSERVATIONS["image"]))
    seen = shown(agent.trajectories, np.array([4]))
    turned = seen | {"observation": np.moveaxis(seen["observation"], -1, 1)}
    np.testing.assert_array_equal(agent.predict(turned)[0], agent.predict(seen)[0])


def test_dropout_is_off():
    agent = small_agent(core=CORES["published with dropout"])
    agent.policy.train()
    seen = shown(agent.trajectories, np.array([4]))
    np.testing.assert_array_equal(agent.predict(seen)[0], agent.predict(seen)[0])


def test_samples_differ_and_the_likeliest_does_not():
    agent = small_agent(some_trajectories(action_space=ACTIONS["Discrete"]))
    seen = shown(agent.trajectories, np.full(200, 4))
    assert len(set(agent.predict(seen)[0])) == 1
    assert len(set(agent.predict(seen, deterministic=False)[0])) > 1
