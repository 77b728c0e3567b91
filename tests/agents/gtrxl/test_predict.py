"""`predict` equals the segment pass step by step, and does not modify states."""

import dataclasses

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from rlxf import GTrXLPPO
from rlxf.agents.gtrxl.policies import MlpGTrXLPolicy
from rlxf.attention import KNN, TokenIndex, Window
from rlxf.utils.errors import NumericalError
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    OBSERVATIONS,
    RECURRENT_CORES,
    VECTOR,
    Scripted,
    last_outputs,
    sampled,
    scripts,
    shifted,
    small_agent,
    small_core,
)

STEPS, ENVS = 20, 3


CORES = {
    "XL": small_core(),
    "KNN": dataclasses.replace(small_core(), memory=KNN(3, 20, 4), pattern=Window(4)),
}


@pytest.fixture(scope="module", params=CORES.values(), ids=CORES)
def agent(request):
    """Return an agent that computes in float32, as users do."""
    return box_agent(request.param)


def box_agent(core):
    """Return an agent with Box actions, which show the smallest difference in memory."""
    env = scripts(shifted(ENVS), action_space=ACTIONS["Box of two axes"])
    return small_agent(env, core=core)


PRECISE = CORES | {name: core for name, core in RECURRENT_CORES.items() if name != "CALM"}


@pytest.fixture(scope="module", params=PRECISE.values(), ids=PRECISE)
def precise_agent(request):
    """Return an agent that computes in float64: sharp attention to far tokens amplifies rounding errors."""
    agent = box_agent(request.param)
    for module in agent.policy.double().modules():
        module.register_forward_pre_hook(lambda _, inputs: tuple(map(to_float64, inputs)))
    return agent


def to_float64(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def observations(seed=0, envs=ENVS, steps=STEPS):
    return np.random.default_rng(seed).uniform(-1, 1, (steps, envs, 3)).astype(np.float32)


def play(agent, seen, starts, state=None):
    """Return actions (steps, E, ...) and the last state."""
    actions = []
    for obs, start in zip(seen, starts, strict=True):
        action, state = agent.predict(obs, state=state, episode_start=start, deterministic=True)
        actions.append(action)
    return np.array(actions), state


def never(steps=STEPS, envs=ENVS):
    return np.zeros((steps, envs), dtype=bool)


@pytest.mark.first_cases(3)
@settings(max_examples=8, deadline=None)
@given(flags=st.lists(st.booleans(), min_size=STEPS * ENVS, max_size=STEPS * ENVS), seed=st.integers(0, 9))
def test_predict_equals_segment_pass(precise_agent, flags, seed):
    starts = np.array(flags).reshape(STEPS, ENVS)
    starts[0] = True
    seen = observations(seed)
    acted, _ = play(precise_agent, seen, starts)
    expected = segment_pass(precise_agent.policy, seen, starts, acted)
    # acted is clipped to the bounds of the action space
    np.testing.assert_allclose(acted.reshape(STEPS, ENVS, -1), expected, atol=1e-6)


def segment_pass(policy, seen, starts, acted):
    """Return the clipped modes of the actions, (steps, E, A), from a single pass over all steps."""
    with torch.no_grad():
        unclipped = torch.zeros(STEPS, ENVS, policy.encoded_action_width)
        previous = unclipped.clone()
        index = where(starts)
        for t in range(STEPS):  # the action before is part of the input, so the pass is repeated
            latent = last_outputs(
                policy,
                torch.as_tensor(seen).transpose(0, 1).reshape(-1, 3),
                previous.transpose(0, 1).reshape(STEPS * ENVS, -1),
                index,
                policy.transformer.initial_state(ENVS),
            )
            mode = policy.heads(latent)[0].mode().reshape(ENVS, STEPS, -1).transpose(0, 1)
            unclipped[t] = mode[t]
            if t + 1 < STEPS:
                previous[t + 1] = mode[t] * ~torch.as_tensor(starts[t + 1])[:, None]
    return unclipped.numpy().clip(-1, 2)


def where(starts):
    """Return the index (E, steps) of steps with episode starts ``starts`` (steps, E)."""
    position, episode = np.zeros((2, ENVS, STEPS), dtype=np.int64)
    for t in range(1, STEPS):
        position[:, t] = np.where(starts[t], 0, position[:, t - 1] + 1)
        episode[:, t] = episode[:, t - 1] + starts[t]
    return TokenIndex(torch.as_tensor(position), torch.as_tensor(episode))


def test_memory_affects_actions(agent):
    """Without this, most tests in this file would pass without a memory."""
    seen, other = observations(), observations()
    other[0] += 0.5
    first, second = play(agent, seen, never())[0], play(agent, other, never())[0]
    assert (np.abs(first[1:9] - second[1:9]).max(axis=(1, 2, 3)) > 1e-4).all()


def test_predict_does_not_modify_state(agent):
    seen = observations()
    _, state = play(agent, seen[:5], never(5))
    before = flat(state)
    starts = np.array([True, False, True])
    agent.predict(seen[5], state=state, episode_start=starts, deterministic=True)
    agent.predict(seen[6], state=state, deterministic=False)
    assert all(torch.equal(a, b) for a, b in zip(before, flat(state), strict=True))


def flat(state):
    cache = state.cache
    tensors = [state.position, state.episode, state.action, cache.index.position, cache.index.episode]
    tensors += [part for layer in cache.layers for part in (layer.keys, layer.values)]
    return [tensor.clone() for tensor in tensors] + [torch.tensor(cache.slot)]


def test_state_can_be_used_twice(agent):
    seen = observations()
    _, state = play(agent, seen[:5], never(5))
    first, _ = play(agent, seen[5:], never(STEPS - 5), state)
    play(agent, observations(1)[5:], never(STEPS - 5), state)
    again, _ = play(agent, seen[5:], never(STEPS - 5), state)
    assert np.array_equal(first, again)


@pytest.mark.parametrize("age", [1, 5, 20])
def test_episode_start_clears_memory(agent, age):
    _, state = play(agent, observations(1)[:age], never(age))
    starts = never()
    starts[0] = True
    old, _ = play(agent, observations(), starts, state)
    fresh, _ = play(agent, observations(), starts)
    np.testing.assert_allclose(old, fresh, atol=1e-5)  # sums in another order: the ring is turned


@pytest.mark.parametrize("age", [1, 5, 20])
def test_previous_episode_has_no_influence(agent, age):
    starts = never()
    starts[0] = True
    pasts = [play(agent, observations(past)[:age], never(age))[1] for past in (1, 2)]
    first, second = (play(agent, observations(), starts, state)[0] for state in pasts)
    assert np.array_equal(first, second)
    carried = [play(agent, observations(), never(), state)[0] for state in pasts]
    assert not np.array_equal(*carried)


def test_episode_start_affects_only_its_environment(agent):
    seen = observations()
    _, state = play(agent, seen[:6], never(6))
    starts = never(6)
    starts[0, 1] = True
    mixed, _ = play(agent, seen[6:12], starts, state)
    going_on, _ = play(agent, seen[6:12], never(6), state)
    fresh, _ = play(agent, seen[6:12], never(6))
    np.testing.assert_allclose(mixed[:, [0, 2]], going_on[:, [0, 2]], atol=1e-6)
    np.testing.assert_allclose(mixed[:, 1], fresh[:, 1], atol=1e-5)
    assert np.abs(mixed[:, 1] - going_on[:, 1]).max() > 1e-4


def test_environments_are_independent(agent):
    seen = observations()
    together, _ = play(agent, seen, never())
    alone, _ = play(agent, seen[:, 1:2], never(envs=1))
    np.testing.assert_allclose(together[:, 1:2], alone, atol=1e-5)


def test_no_state_starts_all_episodes(agent):
    seen = observations()[0]
    initial, state = agent.predict(seen, deterministic=True)
    with_starts, _ = agent.predict(seen, episode_start=np.ones(ENVS, dtype=bool), deterministic=True)
    without_starts, _ = agent.predict(seen, episode_start=np.zeros(ENVS, dtype=bool), deterministic=True)
    assert np.array_equal(initial, with_starts)
    assert np.array_equal(initial, without_starts)
    assert state.position.tolist() == [0] * ENVS


@pytest.mark.parametrize("policy", OBSERVATIONS)
@pytest.mark.parametrize("action_space", ACTIONS.values(), ids=ACTIONS)
def test_a_single_observation_gives_a_single_action(policy, action_space):
    env = Scripted(observation_space=OBSERVATIONS[policy], action_space=action_space)
    agent = small_agent(env, policy)
    obs, _ = env.reset(seed=1)
    state = None
    for start in (True, False, True):
        action, state = agent.predict(obs, state=state, episode_start=np.array([start]))
        assert action_space.contains(env.action_space.dtype.type(action))
    # A bool, as in a loop over one environment.
    action, _ = agent.predict(obs, state=state, episode_start=True)
    assert action.shape == action_space.shape


def test_a_single_observation_is_a_batch_of_one(agent):
    seen = observations(envs=1)
    batched, _ = play(agent, seen, never(envs=1))
    single, _ = play(agent, seen[:, 0], [None] * STEPS)
    assert np.array_equal(batched[:, 0], single)


def test_box_actions_stay_within_bounds(agent):
    with torch.no_grad():
        agent.policy.log_std += 3
    try:
        actions = np.array([agent.predict(observations()[0])[0] for _ in range(20)])
    finally:
        with torch.no_grad():
            agent.policy.log_std -= 3
    assert actions.min() == -1
    assert actions.max() == 2


def test_a_state_of_another_batch_is_refused(agent):
    _, state = agent.predict(observations()[0])
    with pytest.raises(ValueError, match="state is of 3 environments, the observation of 2"):
        agent.predict(observations()[0, :2], state=state)


def test_episode_start_of_another_batch_is_rejected(agent):
    _, state = agent.predict(observations()[0])
    with pytest.raises(ValueError, match=r"episode_start must have shape \(3,\), got \(2,\)"):
        agent.predict(observations()[0], state=state, episode_start=np.zeros(2, dtype=bool))


def test_an_observation_of_another_shape_is_refused(agent):
    with pytest.raises(ValueError, match="shape"):
        agent.predict(np.zeros((3, 4), np.float32))


NAMED = spaces.Dict({"choice": spaces.Discrete(4), "place": VECTOR})
COLOR = spaces.Box(0, 255, (36, 36, 3), np.uint8)
NAN = np.array([0.5, np.nan, *[0.0] * (VECTOR.shape[0] - 2)], np.float32)
PLACE = np.zeros(VECTOR.shape, np.float32)
SPACES = {
    "named": NAMED,
    "image": COLOR,
    "choice": spaces.Discrete(4),
    "bits": spaces.MultiBinary(3),
    "vector": VECTOR,
}
BAD_OBSERVATIONS = {
    "missing": ("named", {"choice": 1}, r"lacks the part 'place'; its space has 'choice', 'place'"),
    "extra": ("named", {"choice": 1, "place": PLACE, "x": 1}, r"has the unknown part 'x'; its space has"),
    "array": ("named", PLACE, r"the observation is array.* \(ndarray\), not a dict"),
    "out of range": ("choice", 5, r"the observation holds 5, which is not in its space Discrete\(4\)"),
    "batch": ("choice", np.array([1, 0, 7]), r"the observation 2 of the batch holds 7, which is not in"),
    "in a part": ("named", {"choice": 9, "place": PLACE}, r"the observation 'choice' holds 9"),
    "fraction": ("choice", 2.9, r"the observation holds 2.9, no value of Discrete\(4\)"),
    "fraction in a part": (
        "named",
        {"choice": 0.5, "place": PLACE},
        r"observation 'choice' holds 0.5, no val",
    ),
    "scaled": (
        "image",
        np.full(COLOR.shape, 0.25, np.float32),
        r"holds 0.25, no .*pass pixels from 0 to 255",
    ),
    "no bit": ("bits", [2, 0, 0], r"the observation holds 2, no value of MultiBinary\(3\)"),
    "no bit in a batch": ("bits", np.array([[0, 1, 1], [0, -1, 0]]), r"holds -1, no value of MultiBinary"),
    "half a bit": ("bits", [0, 0.5, 0], r"holds 0.5, no value of MultiBinary"),
    "too bright": ("image", np.full(COLOR.shape, 300), r"holds 300, no .*pass pixels from 0 to 255"),
    "too dark": ("image", np.full(COLOR.shape, -3.0), r"holds -3.0, no .*pass pixels from 0 to 255"),
    "batch sizes": (
        "named",
        {"choice": np.array([1]), "place": np.stack([PLACE, PLACE])},
        r"different batch sizes, 'choice': a batch of 1, 'place': a batch of 2",
    ),
    "a batch and one": (
        "named",
        {"choice": 1, "place": np.stack([PLACE, PLACE])},
        r"different batch sizes, 'choice': one, 'place': a batch of 2",
    ),
    "gray": ("image", np.zeros((36, 36), np.uint8), r"has shape \(36, 36\), but its space .*36, 36"),
    "NaN": ("vector", NAN, r"the observation is nan at index \[1\]"),
    "NaN in a batch": ("vector", np.stack([PLACE, NAN]), r"observation 1 of the batch is nan at index \[1\]"),
    "NaN in a part": ("named", {"choice": 0, "place": NAN}, r"the observation 'place' is nan at index \[1\]"),
}
POLICY_OF = {"named": "MultiInputGTrXLPolicy", "image": "CnnGTrXLPolicy"}


@pytest.fixture(scope="module")
def agents():
    """Return an agent for each of the `SPACES`."""
    policies = {name: POLICY_OF.get(name, "MlpGTrXLPolicy") for name in SPACES}
    return {name: small_agent(scripts(shifted(2), space), policies[name]) for name, space in SPACES.items()}


@pytest.mark.parametrize("case", BAD_OBSERVATIONS)
def test_the_fault_of_an_observation_is_named(agents, case):
    name, observation, message = BAD_OBSERVATIONS[case]
    kind = NumericalError if case.startswith("NaN") else ValueError
    with pytest.raises(kind, match=message):
        agents[name].predict(observation)


def test_another_error_is_not_a_fault_of_whole_numbers_as_floats(agents):
    with pytest.raises(TypeError, match="state must be"):
        agents["image"].predict(np.zeros(COLOR.shape, np.float32), state=(1,))
    _, state = agents["choice"].predict(np.array([1, 2]))
    with pytest.raises(ValueError, match="state is of 2 environments, the observation of 1"):
        agents["choice"].predict(np.array([1.0]), state=state)


def test_too_large_observations_are_named(agents):
    message = r"tokens reach .*e\+.*: observations, actions or returns are too large; normalize them"
    with pytest.raises(NumericalError, match=message):
        agents["vector"].predict(np.full(VECTOR.shape, 1e30, np.float32))


@pytest.mark.parametrize("name", SPACES)
def test_whole_numbers_of_any_dtype_are_accepted(agents, name):
    space = SPACES[name]
    space.seed(0)
    given = space.sample()
    values = given if isinstance(given, dict) else {"": given}
    floats = {key: np.asarray(value, np.float64) for key, value in values.items()}
    expected, _ = agents[name].predict(given, deterministic=True)
    action, _ = agents[name].predict(floats if isinstance(given, dict) else floats[""], deterministic=True)
    np.testing.assert_array_equal(action, expected)


def test_predict_has_no_gradient(agent):
    agent.predict(observations()[0])
    assert all(parameter.grad is None for parameter in agent.policy.parameters())
    assert agent.observation_space == VECTOR


@pytest.mark.parametrize("actions", ACTIONS)
def test_the_most_likely_action_is_the_mode_of_the_distribution(actions):
    policy = small_agent(scripts(shifted(2), action_space=ACTIONS[actions])).policy
    latent = 10 * torch.randn(50, policy.core.width)
    with torch.no_grad():
        assert torch.equal(policy.most_likely_actions(latent), policy.action_distribution(latent).mode())


@pytest.mark.parametrize("persist", [False, True])
def test_no_start_of_an_episode_equals_starts_that_are_all_false(persist):
    env = scripts(shifted(ENVS), action_space=ACTIONS["Box of two axes"])
    agent = small_agent(env, persist_memory_across_episodes=persist)
    obs, state = sampled(agent.observation_space, ENVS), None
    for _ in range(3):
        before = state
        first, state = agent.predict(obs, before, deterministic=True)
        for start in (np.zeros(ENVS, bool), [False] * ENVS):
            again, _ = agent.predict(obs, before, start, deterministic=True) if before else (first, None)
            assert np.array_equal(first, again)
    with pytest.raises(ValueError, match=r"episode_start must have shape \(3,\), got \(1,\)"):
        agent.predict(obs, state, np.zeros(1, bool))


def test_the_state_prints_as_a_short_summary(agent):
    _, state = agent.predict(observations()[0])
    assert repr(state) == f"RecurrentPolicyState(environments={ENVS}, layers={agent.core.layers})"


OVERRIDDEN = {"Discrete": 2, "Discrete from 2": 4, "Box": [1, 2]}
OVERRIDDEN |= {"MultiDiscrete": [1, 2], "MultiBinary": [1, 1, 1]}
"""Space of actions -> the modes for the parameters 1, 2, 3 ..."""


@pytest.mark.parametrize("space", OVERRIDDEN)
def test_deterministic_actions_are_those_of_an_overridden_distribution(space):
    class Shifted(MlpGTrXLPolicy):
        def action_distribution(self, latent):
            parameters = 1.0 + torch.arange(self.action_net.out_features).expand(len(latent), -1)
            return self.action_head.distribution(parameters, self.log_std, latent)

    env = scripts(shifted(ENVS), action_space=ACTIONS[space])
    agent = GTrXLPPO(Shifted, env, core=small_core(), seed=0, n_steps=16, segment_length=4, batch_size=16)
    actions, _ = agent.predict(observations()[0], deterministic=True)
    np.testing.assert_array_equal(actions, [OVERRIDDEN[space]] * ENVS)
