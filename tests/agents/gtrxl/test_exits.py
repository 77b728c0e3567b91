"""Early outputs are trained to match the last output, which gets no gradient from them."""

from copy import copy
from dataclasses import replace

import pytest
import torch
from stable_baselines3.common.distributions import MultiCategoricalDistribution
from torch.distributions import kl_divergence

from rlxf.agents.gtrxl.losses import early_exit_losses
from rlxf.attention import CALM
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    all_segments,
    rollouts,
    scripts,
    shifted,
    small_agent,
    small_core,
)
from tests.attention.oracle import close

CORE = replace(small_core(), layers=3, depth=CALM("classifier"))
VF_COEF = 0.5


def read(actions):
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
    policy, batch, exits = read(actions)
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
    policy, batch, exits = read(actions)
    assert "log_std" in gradients(slow_exit_loss(policy, exits, batch), policy)
    assert "log_std" not in gradients(early_exit_losses(policy, exits, batch, VF_COEF)["exit_loss"], policy)
