"""Tests of the attention and the gates of an agent over an episode."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlxf import BehaviorCloning
from rlxf.agents.decision_transformer.conditioning import ElasticHistory, HighestValueReturn, MaxReturn
from rlxf.agents.inspection import (
    PREDICTED_TOKENS,
    TARGET_TOKENS,
    check_readable,
    episode_inspector,
)
from rlxf.agents.offline.objectives import QRegularized
from rlxf.attention import Add, TransformerSpec
from rlxf.attention.inspection import attention_weights, gate_activations
from tests.agents.decision_transformer import test_episode_context as episodes
from tests.agents.decision_transformer import worlds as offline
from tests.agents.gtrxl.worlds import (
    GOES_ON,
    MEMORY_CORES,
    RECURRENT_CORES,
    recurrent_core,
    scripts,
    small_agent,
    small_core,
)

STEPS = 14
ONLINE_CORES = {
    "GTrXL": small_core(),
    "without gates": small_core(residual=Add()),
    **MEMORY_CORES,
    **{name: core for name, core in RECURRENT_CORES.items() if core.has_attention},
}
WINDOW_CORES = {name: core for name, core in offline.CORES.items() if core.has_attention}
EPISODE_CORES = {name: core for name, core in episodes.CORES.items() if core.has_attention}
WHOLE = (
    "GTrXL",
    "without gates",
    "published",
    "RoPE",
    "learned positions",
    "ALiBi and a window",
    "XL",
    "Universal",
)
"""Cores without attention on tokens other than those of steps."""


def online_episode(core):
    """Play with a GTrXL; return its inspector and the actions."""
    env = scripts([[GOES_ON] * 99])
    inspector = episode_inspector(small_agent(env, core=core))
    return played(inspector, env.reset(), lambda actions: env.step(actions)[0])


def offline_episode(agent):
    """Replay an episode with a Decision Transformer; return its inspector and the actions."""
    data, steps = agent.trajectories, iter(range(1, STEPS))
    first = int(data.offsets[np.argmax(data.lengths >= STEPS)])

    def observation(step):
        if agent.conditioning.needs_target:
            return offline.shown(data, np.array([first + step]))
        return data.observations[[first + step]]

    return played(episode_inspector(agent), observation(0), lambda actions: observation(next(steps)))


def played(inspector, observation, step):
    """Play an episode; return the inspector and the actions."""
    state, actions = None, []
    for number in range(STEPS):
        chosen, state = inspector.predict(observation, state, np.array([number == 0]), deterministic=True)
        actions.append(chosen[0])
        if number < STEPS - 1:
            observation = step(chosen)
    return inspector, np.array(actions)


EPISODES = {
    **{f"online {name}": (lambda core=core: online_episode(core)) for name, core in ONLINE_CORES.items()},
    **{
        f"window {name}": (lambda core=core: offline_episode(offline.small_agent(core=core)))
        for name, core in WINDOW_CORES.items()
    },
    **{
        f"episode {name}": (lambda core=core: offline_episode(episodes.episodic_agent(core)))
        for name, core in EPISODE_CORES.items()
    },
    "predicted return": lambda: offline_episode(offline.small_agent(conditioning=MaxReturn())),
    "elastic history": lambda: offline_episode(offline.small_agent(conditioning=ElasticHistory())),
    "highest value": lambda: offline_episode(
        offline.small_agent(conditioning=HighestValueReturn(), objective=QRegularized(hidden_sizes=(8,)))
    ),
}
each_episode = pytest.mark.parametrize("name", EPISODES)


@cache
def shared_episode(name):
    """Return the inspector and the actions of an episode, which tests do not change."""
    return EPISODES[name]()


@each_episode
@torch.no_grad()
def test_outputs_of_the_passes_choose_the_actions_of_the_episode(name):
    inspector, actions = shared_episode(name)
    policy = inspector._agent.policy
    y = torch.cat(
        [p.transformer.outputs(p.x, p.index, p.state)[0, list(p.queries)] for p in inspector.passes()]
    )
    if name.startswith("online"):
        chosen = policy.heads(y)[0].get_actions(deterministic=True)
    else:
        chosen = policy.loss.head.choose(y, deterministic=True)
    space = inspector._agent.action_space
    chosen = chosen.numpy() if not hasattr(space, "low") else chosen.numpy().clip(space.low, space.high)
    np.testing.assert_allclose(actions, chosen, atol=1e-4)


@each_episode
def test_weights_are_distributions_over_the_steps_so_far(name):
    inspector, _ = shared_episode(name)
    spec, attention = inspector._policy.transformer.spec, inspector.attention()
    assert len(attention.weights) == STEPS
    for step, weights in enumerate(attention.weights):
        assert weights.shape == (len(attention.layers), spec.heads, step + 1, len(attention.tokens))
        assert weights.min() >= 0
        total = weights.sum(axis=(2, 3))
        assert (total < 1 + 1e-5).all()
        if name.split(" ", 1)[1] in WHOLE or name in ("predicted return", "elastic history"):
            np.testing.assert_allclose(total, 1, atol=1e-5)
    assert all(values.shape == (STEPS,) for values in attention.gates.values())
    assert len(attention.layers) == len(inspector._policy.transformer.attention_passes)
    assert inspector.rows == attention.weights[0].size


@pytest.mark.parametrize("name", ["online GTrXL", "online memory tokens", "episode XL", "episode KNN"])
def test_attention_at_a_step_does_not_depend_on_later_steps(name):
    inspector, _ = EPISODES[name]()
    whole = inspector.attention()
    for kept in (inspector._tokens if name.startswith("online") else inspector._states,):
        del kept[STEPS // 2 :]
    half = inspector.attention()
    for before, after in zip(half.weights, whole.weights, strict=False):
        np.testing.assert_allclose(before, after, atol=1e-6)
    for gate, values in half.gates.items():
        np.testing.assert_allclose(values, whole.gates[gate][: STEPS // 2], atol=1e-6)


def test_attention_of_a_gtrxl_is_that_of_its_transformer():
    inspector, _ = online_episode(small_core())
    (one,), attention = inspector.passes(), inspector.attention()
    for layer, expected in enumerate(attention_weights(one.transformer, one.x, one.index)):
        for step, weights in enumerate(attention.weights):
            np.testing.assert_array_equal(weights[layer, :, :, 0], expected[0, :, step, : step + 1].numpy())
    gates = gate_activations(one.transformer, one.x, one.index)
    expected = gates["blocks.1.feed_forward_norm.residual"][0].mean(dim=-1)
    np.testing.assert_allclose(attention.gates["layer_2/feed_forward_gate"], expected.numpy(), rtol=1e-6)
    assert len(attention.gates) == 4
    assert attention.returns_to_go is None


def test_attention_of_a_window_is_placed_at_its_steps():
    """The window of step t contains the tokens of the last K steps; its last but one token decides."""
    agent = offline.small_agent(core=offline.CORES["published"])
    inspector, _ = offline_episode(agent)
    attention = inspector.attention()
    for step, (weights, state) in enumerate(zip(attention.weights, inspector._states, strict=True)):
        inputs = agent.policy.decision_inputs(state)
        inside = min(step + 1, offline.K)
        for layer, expected in enumerate(attention_weights(agent.policy.transformer, **inputs)):
            newest = expected[0, :, -2].unflatten(-1, (offline.K, 3))
            np.testing.assert_array_equal(weights[layer, :, step + 1 - inside :], newest[:, -inside:].numpy())
        assert (weights[:, :, : step + 1 - inside] == 0).all()
        assert (weights[:, :, -1, 2] == 0).all(), "the action of the step is not chosen yet"
    assert attention.returns_to_go.shape == (STEPS,)
    assert attention.gates == {}


def test_memory_of_a_window_is_placed_at_its_steps():
    """A window of one layer that attends to its memory looks further back than K steps."""
    agent = offline.small_agent(core=offline.CORES["memory"])
    inspector, _ = offline_episode(agent)
    weights = inspector.attention().weights[-1][0]
    assert (weights[:, : STEPS - offline.K] > 0).any()
    assert (weights[:, -offline.K - 1 :, :2] > 0).all()


def test_names_of_tokens_follow_the_conditioning():
    assert episode_inspector(offline.small_agent()).tokens == TARGET_TOKENS
    assert episode_inspector(offline.small_agent(conditioning=MaxReturn())).tokens == PREDICTED_TOKENS


def test_agents_without_attention_are_refused():
    data = offline.some_trajectories()
    with pytest.raises(TypeError, match="got BehaviorCloning"):
        episode_inspector(BehaviorCloning(data, device="cpu"))
    with pytest.raises(ValueError, match="no layer of this agent has attention, only recurrence=GatedDelta"):
        episode_inspector(small_agent(scripts([[GOES_ON]]), core=recurrent_core()))


def test_attention_that_cannot_be_read_is_refused(monkeypatch):
    transformer = TransformerSpec(width=8, layers=1, heads=2).build().train()
    check_readable(transformer)
    assert transformer.training

    def missing(*args):
        raise NotImplementedError

    monkeypatch.setattr(type(transformer.blocks[0].attention.kernel), "inspect_weights", missing)
    with pytest.raises(
        ValueError, match=r"the attention of Softmax\(.*\) cannot be read: NotImplementedError"
    ):
        check_readable(transformer)
    monkeypatch.setattr(type(transformer), "weights", lambda *args: [SimpleNamespace(shape=(1, 1, 2, 2))])
    with pytest.raises(ValueError, match="no weights of each head"):
        check_readable(transformer)
