"""The formulas of PPO equal reference loops, and early outputs are trained to match the last output."""

import math
from copy import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.distributions import MultiCategoricalDistribution
from torch.distributions import kl_divergence

from rlxf.agents.common.losses import masked_mean
from rlxf.agents.gtrxl.losses import (
    PPOLoss,
    approximate_kl,
    clipped_objective,
    discounted_sum,
    early_exit_losses,
    generalized_advantage_estimate,
    normalize_advantages,
)
from rlxf.attention import CALM
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    all_segments,
    last_outputs,
    rollouts,
    scripts,
    shifted,
    small_agent,
    small_core,
)
from tests.attention.oracle import close


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_advantage(rewards, values, next_values, dones, gamma, gae_lambda):
    """``A_t = sum_l (gamma lambda)^l delta_{t+l}``, term by term, up to the end of the episode."""
    steps, envs = rewards.shape
    following = torch.cat([values, next_values[None]])[1:]
    advantages = torch.zeros_like(rewards)
    for env in range(envs):
        for t in range(steps):
            for later in range(t, steps):
                ended = bool(dones[later, env])
                ahead = 0.0 if ended else gamma * following[later, env]
                delta = rewards[later, env] + ahead - values[later, env]
                advantages[t, env] += (gamma * gae_lambda) ** (later - t) * delta
                if ended:
                    break
    return advantages


@settings(max_examples=30, deadline=None)
@given(
    steps=st.integers(1, 17),
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    gae_lambda=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    chance=st.sampled_from([0.0, 0.2, 0.7, 1.0]),
    seed=st.integers(0, 1000),
)
def test_advantages_equal_double_sum(steps, gamma, gae_lambda, chance, seed):
    rewards, values, noise = random(3, steps, 3, seed=seed)
    next_values, dones = random(3, seed=seed + 1), noise.sigmoid() < chance
    arguments = rewards, values, next_values, dones, gamma, gae_lambda
    torch.testing.assert_close(generalized_advantage_estimate(*arguments), slow_advantage(*arguments))


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 64, 100])
def test_discounted_sum_equals_recursion(steps):
    x, discount = random(steps, 2), random(steps, 2, seed=1).sigmoid()
    y = torch.zeros(2, dtype=x.dtype)
    expected = torch.empty_like(x)
    for t in reversed(range(steps)):
        y = expected[t] = x[t] + discount[t] * y
    torch.testing.assert_close(discounted_sum(x, discount), expected)


def test_steps_after_episode_end_are_ignored():
    rewards, values = random(2, 6, 1)
    dones = torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool)[:, None]
    before = generalized_advantage_estimate(rewards, values, values[0], dones, 0.9, 0.9)
    rewards[3:] += 100
    values[3:] -= 50
    after = generalized_advantage_estimate(rewards, values, values[0], dones, 0.9, 0.9)
    assert torch.equal(before[:3], after[:3])
    assert (before[3:] != after[3:]).all()


def test_normalization_ignores_filler_rows():
    advantages, weight = random(4, 8) * 3 + 5, (random(4, 8, seed=1) > 0).double()
    normal = normalize_advantages(advantages, weight, 1e-8)[weight == 1]
    assert abs(normal.mean()) < 1e-6
    assert abs(normal.std(correction=0) - 1) < 1e-6
    changed = torch.where(weight == 1, advantages, 1e3)
    assert torch.equal(normalize_advantages(changed, weight, 1e-8)[weight == 1], normal)


@pytest.mark.parametrize("deviation", [0.0, 1e-12, 1e-6, 1e-3])
def test_normalization_does_not_amplify_noise(deviation):
    """In a solved task, noise must not be amplified."""
    noise = random(4, 64) * deviation + 0.7
    normal = normalize_advantages(noise, torch.ones_like(noise), 0.05)
    assert normal.isfinite().all()
    assert normal.abs().max() <= 5 * deviation / 0.05 + 1e-12


def test_normalization_without_real_steps_is_zero():
    advantages = random(2, 4)
    assert normalize_advantages(advantages, torch.zeros(2, 4), 0.05).isfinite().all()
    assert masked_mean(advantages, torch.zeros(2, 4)) == 0


def test_average_leaves_out_weight_zero():
    assert masked_mean(torch.tensor([1.0, 50.0, 3.0]), torch.tensor([1.0, 0.0, 1.0])) == 2


@pytest.mark.parametrize("clip_range", [0.1, 0.3])
def test_the_clipped_objective_is_the_smaller_of_two(clip_range):
    ratio, advantages = random(200).exp(), random(200, seed=1)
    for r, a, got in zip(ratio, advantages, clipped_objective(ratio, advantages, clip_range), strict=True):
        clipped = min(max(float(r), 1 - clip_range), 1 + clip_range)
        assert float(got) == pytest.approx(min(float(r * a), clipped * float(a)))


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"), [(1.5, 1, False), (0.5, -1, False), (1.5, -1, True)]
)
def test_clipped_objective_has_no_gradient_beyond_clip_range(ratio, advantage, moves):
    r = torch.tensor([float(ratio)], requires_grad=True)
    clipped_objective(r, torch.tensor([float(advantage)]), 0.2).sum().backward()
    assert bool(r.grad) == moves


@given(st.floats(-20, 20, allow_subnormal=False))
def test_kl_estimate_is_nonnegative(log_ratio):
    assert approximate_kl(torch.tensor(log_ratio, dtype=torch.float64)) >= -1e-15 * abs(log_ratio)


def test_kl_estimate_is_unbiased():
    old, new = torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(0.3, 1.1)
    x = torch.linspace(-10, 10, 20001, dtype=torch.float64)
    mean = torch.trapezoid(old.log_prob(x).exp() * approximate_kl(new.log_prob(x) - old.log_prob(x)), x)
    assert float(mean) == pytest.approx(float(torch.distributions.kl_divergence(old, new)), abs=1e-6)


@pytest.mark.parametrize("clip_range_vf", [None, 0.1])
@torch.no_grad()
def test_the_loss_equals_the_sum_of_its_terms_over_steps(clip_range_vf):
    """Current probabilities and values differ from those of the rollout; some steps have weight 0."""
    agent = small_agent(scripts(shifted(3)))
    with torch.enable_grad():  # which a training requires
        batch = all_segments(next(rollouts(agent, 1)))
    noise = torch.randn(2, len(batch.weight), generator=torch.Generator().manual_seed(0))
    weight = (torch.arange(len(batch.weight)) % 5 != 0).float()
    old = batch.log_probs + 0.3 * noise[0]
    batch = replace(batch, log_probs=old, values=batch.values + 0.3 * noise[1], weight=weight)
    losses = PPOLoss(0.2, clip_range_vf, ent_coef=0.7, vf_coef=0.4, reconstruction_coef=0.0)(
        agent.policy, batch
    )
    latent = last_outputs(agent.policy, batch.obs, batch.previous, batch.index, batch.state)
    distribution, values = agent.policy.heads(latent)
    new, entropies = distribution.log_prob(batch.actions), distribution.entropy()
    terms = []
    for t in weight.nonzero().flatten():
        ratio = math.exp(new[t] - batch.log_probs[t])
        gain = min(ratio * batch.advantages[t], min(max(ratio, 0.8), 1.2) * batch.advantages[t])
        change = values[t] - batch.values[t]
        if clip_range_vf is not None:
            change = min(max(change, -clip_range_vf), clip_range_vf)
        error = (batch.returns[t] - batch.values[t] - change) ** 2
        terms.append([-gain, error, -entropies[t], ratio - 1 - math.log(ratio), abs(ratio - 1) > 0.2])
    expected = torch.tensor(terms).mean(dim=0)
    names = ["policy_gradient_loss", "value_loss", "entropy_loss", "approx_kl", "clip_fraction"]
    close(torch.stack([losses[name] for name in names]), expected, 1e-5)
    close(losses["loss"], expected[0] + 0.4 * expected[1] + 0.7 * expected[2], 1e-5)


CORE = replace(small_core(), layers=3, depth=CALM("classifier"))
VF_COEF = 0.5


def policy_batch_exits(actions):
    """Return a policy, a minibatch, and the outputs of all exits."""
    agent = small_agent(scripts(shifted(3), action_space=ACTIONS[actions]), core=CORE)
    batch = all_segments(next(rollouts(agent, 1)))
    return agent.policy, batch, agent.policy.exit_outputs(batch.obs, batch.previous, batch.index, batch.state)


def kl(last, early):
    """Return ``KL(last || early)`` computed by torch, summed over components."""
    if isinstance(last, MultiCategoricalDistribution):
        return sum(map(kl_divergence, last.distribution, early.distribution))
    error = kl_divergence(last.distribution, early.distribution)
    return error.flatten(1).sum(-1) if error.dim() > 1 else error


def slow_exit_loss(policy, exits, batch):
    """Compute the loss of `early_exit_losses` output by output."""
    outputs = exits.outputs.flatten(1, 2)
    with torch.no_grad():
        last, value = policy.heads(outputs[-1])
    last, loss = copy(last), 0.0  # SB3 has one object for all distributions
    for share, output in zip(exits.loss_weights[:-1], outputs[:-1], strict=True):
        early, own = policy.heads(output)
        error = kl(last, early) + VF_COEF * (own - value).square()
        loss = loss + share / exits.loss_weights[-1] * (error * batch.weight).sum() / batch.weight.sum()
    return loss


def gradients(loss, policy):
    weights = dict(policy.named_parameters())
    actual = torch.autograd.grad(loss, list(weights.values()), retain_graph=True, allow_unused=True)
    return {name: grad for name, grad in zip(weights, actual, strict=True) if grad is not None}


@pytest.mark.parametrize("actions", ACTIONS)
def test_early_outputs_learn_from_last_output(actions):
    policy, batch, exits = policy_batch_exits(actions)
    loss, slow = (
        early_exit_losses(policy, exits, batch, VF_COEF)["exit_loss"],
        slow_exit_loss(policy, exits, batch),
    )
    assert loss > 0
    close(loss, slow, 1e-5)
    actual, expected = gradients(loss, policy), gradients(slow, policy)
    assert expected.keys() - actual.keys() <= {"log_std"}
    for name, gradient in actual.items():
        close(gradient, expected[name], 1e-5)


@pytest.mark.parametrize("actions", ["Box", "Box of two axes"])
def test_exit_loss_has_no_gradient_for_deviation(actions):
    """Different means would always increase the standard deviation, which is shared with the last output."""
    policy, batch, exits = policy_batch_exits(actions)
    assert "log_std" in gradients(slow_exit_loss(policy, exits, batch), policy)
    assert "log_std" not in gradients(early_exit_losses(policy, exits, batch, VF_COEF)["exit_loss"], policy)
