"""Tests of the batches and the loss of the critic against slow loops, and of values beyond a window."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlxf import DecisionTransformer
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.offline.objectives import QRegularized
from rlxf.attention import XL, Window, XLRelative
from rlxf.data import Windows
from tests.agents.decision_transformer.worlds import ACTIONS, shown, small_agent, some_trajectories

LENGTHS = (9, 1, 4, 14, 2)
TERMINATED = np.array([True, False, False, True, False])
K = 5
STARTS = [0, 2, 4, 5, 9, 10, 14, 15, 19, 23, 28]


def agent_of(name="Box", n_steps=None, **changes):
    """Return an agent on terminated and truncated episodes with a critic of random weights."""
    data = some_trajectories(
        action_space=ACTIONS[name], lengths=LENGTHS, terminated=TERMINATED, truncated=~TERMINATED
    )
    objective = QRegularized(hidden_sizes=(8,), discount=0.9, n_steps=n_steps)
    agent = small_agent(data, context_length=K, objective=objective, **changes)
    with torch.no_grad():
        for target in agent.policy.loss.target.buffers():
            target.add_(torch.randn_like(target))
    return agent


@pytest.mark.parametrize("memory", [False, True])
def test_batches_of_the_critic_are_those_of_the_data(memory):
    core = decision_transformer(width=8, layers=1, heads=2)
    if memory:
        core = replace(core, position=XLRelative(), pattern=Window(5), memory=XL(4))
    agent = agent_of(core=core)
    model, data = agent.policy, agent.trajectories
    batch = model.windows(data).starting_at(STARTS)
    found, burn_in = model.critic_windows(batch, model.steps(batch)), model.burn_in_steps
    episodes = np.searchsorted(data.offsets, STARTS, side="right") - 1
    normalized = (data.observations - data.observation_mean) / data.observation_std
    assert torch.equal(found.mask, batch.mask[:, burn_in:])
    assert not found.mask.all()
    for row, episode in enumerate(episodes):
        steps = data.offsets[episode] + batch.time_steps[row, burn_in:].numpy()
        last = data.offsets[episode + 1] - 1
        assert found.terminated[row] == (steps[-1] == last and TERMINATED[episode])
        for column in found.mask[row].nonzero()[:, 0].tolist():
            step = steps[column]
            np.testing.assert_allclose(found.features[row, column], normalized[step], rtol=1e-5, atol=1e-5)
            expected = data.rewards[step] / agent.return_scale
            assert found.rewards[row, column] == pytest.approx(expected, rel=1e-6)


def test_rewards_of_the_critic_keep_their_digits_next_to_large_returns():
    """In float32, differences of returns-to-go of about 1e6 would lose rewards of 0.01."""
    agent = agent_of()
    rewards = np.full(agent.trajectories.steps, 0.01, np.float32)
    rewards[agent.trajectories.offsets[1:] - 1] = 1e6
    data, model = agent.trajectories.with_rewards(rewards), agent.policy
    batch = model.windows(data).starting_at([0])
    found = model.critic_windows(batch, model.steps(batch)).rewards * agent.return_scale
    np.testing.assert_allclose(found, rewards[None, :K], rtol=1e-6)


def slow_critic_loss(agent, windows, chosen, n_steps):
    """Compute the loss of the critic step by step."""
    loss, g, errors = agent.policy.loss, 0.9, []
    for b in range(len(windows.mask)):
        ended = bool(windows.terminated[b])
        for i in range(K):
            if not windows.mask[b, i] or (i == K - 1 and not ended):
                continue
            end = K - 1 if n_steps is None else min(i + n_steps, K - 1)
            if ended and (n_steps is None or i + n_steps > K - 1):
                target = sum(g ** (j - i) * windows.rewards[b, j] for j in range(i, K))
            else:
                x, a = windows.features[b, end], chosen[b, end]
                value = min(loss.target(x, a))
                target = sum(g ** (j - i) * windows.rewards[b, j] for j in range(i, end))
                target = target + g ** (end - i) * value
            for q in loss.critic(windows.features[b, i], windows.actions[b, i]):
                errors.append((q - target) ** 2)
    return 2 * torch.stack(errors).mean()


@pytest.mark.parametrize("n_steps", [None, 1, 2])
@pytest.mark.parametrize("name", ["Box", "Discrete"])
def test_the_loss_of_the_critic_equals_a_slow_loop(name, n_steps, monkeypatch):
    agent = agent_of(name, n_steps)
    model, batch = agent.policy.eval(), Windows(agent.trajectories, K).starting_at(STARTS)
    monkeypatch.setattr(model.loss.head, "add_target_noise", lambda action: action + 0.5)
    windows = model.critic_windows(batch, model.steps(batch))
    chosen = model.loss.head.network_action(torch.randn(*windows.mask.shape, model.transformer.spec.width))
    with torch.no_grad():
        found, _ = model.loss._critic_loss(chosen, windows)
        expected = slow_critic_loss(agent, windows, chosen + 0.5, n_steps)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_target_networks_start_with_the_weights_of_the_critic():
    objective, core = QRegularized(hidden_sizes=(8, 8)), decision_transformer(width=8, layers=1)
    agent = DecisionTransformer(some_trajectories(), K, core=core, objective=objective, device="cpu")
    loss = agent.policy.loss
    for target, value in zip(loss.target.buffers(), loss.critic.parameters(), strict=True):
        assert torch.equal(target, value)


def first_action(**options):
    """Train on episodes of four steps, whose first action decides the last reward; return that action.

    Windows have two steps, so no window contains both. A quarter of the episodes takes the better action.
    """
    good = np.repeat(np.arange(64) % 4 == 0, 4)
    time = np.tile(np.arange(4), 64)
    observations = np.stack([time / 3, np.where(time == 0, 0, np.where(good, 1, -1))], axis=1)
    rewards = np.where(good & (time == 3), 1.0, 0.0).astype(np.float32)
    data = some_trajectories(
        observation_space=spaces.Box(-1, 1, (2,)),
        action_space=spaces.Box(-1, 1, (1,)),
        lengths=(4,) * 64,
        observations=observations.astype(np.float32),
        actions=np.where(good, 0.8, -0.8).astype(np.float32)[:, None],
        rewards=rewards,
        return_to_go=np.repeat(rewards[3::4], 4),
    )
    core = decision_transformer(width=16, layers=1, dropout=0.0)
    objective = QRegularized(eta=50.0, hidden_sizes=(32,), target_rate=0.05, **options)
    agent = DecisionTransformer(data, 2, 3e-3, core=core, objective=objective, seed=0, device="cpu")
    agent.learn(500)
    start = shown(data, np.array([4]))
    assert start["return_to_go"] == 0
    return agent.predict(start)[0].item()


@pytest.mark.thorough
def test_values_reach_rewards_after_the_end_of_a_window():
    assert first_action() > 0 > first_action(discount=0.0)
