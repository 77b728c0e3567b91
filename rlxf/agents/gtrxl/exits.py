"""Auxiliary losses for early exits: self-distillation from the last layer and exit prediction."""

from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import DiagGaussianDistribution, Distribution
from torch import Tensor
from torch.distributions import Normal
from torch.nn import functional as F

from rlxf.agents.gtrxl.distributions import choices, divergence, would_do_the_same
from rlxf.agents.gtrxl.rollout import Segments
from rlxf.agents.leaving import check_choices
from rlxf.agents.losses import average
from rlxf.attention import TransformerSpec, Verdict
from rlxf.attention.depth.calm import lead
from rlxf.attention.depth.exits import ExitDepth, Exits

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.policy import GTrXLPolicy


def exit_parts(policy: "GTrXLPolicy", exits: Exits, batch: Segments, vf_coef: float) -> dict[str, Tensor]:
    """Return auxiliary losses for early exits, by name; none if the core has no early exits.

    The rollout uses the last output, so PPO and distillation train the last output. Each earlier output n is
    trained with ``KL(last || n) + vf_coef (V_n - V_last)^2``, weighted by its loss weight divided by that of
    the last output. The sum is "exit_loss". The standard deviation of Box actions is shared by all outputs
    and gets no gradient from this KL, so only the last output controls exploration. "exit_lesson" is the loss
    that trains the depth controller when to exit.
    """
    if exits.lesson is None:
        return {}
    *early, last = exits.outputs.flatten(1, 2)
    with torch.no_grad():
        target, value = _heads(policy, last)
    predictions = [_heads(policy, output) for output in early]
    errors = torch.stack(
        [divergence(own, target, 1.0) + vf_coef * (v - value).square() for own, v in predictions]
    )
    shares = exits.shares[:-1] / exits.shares[-1]
    parts = {"exit_loss": torch.stack([average(each, batch.weight) for each in errors]) @ shares}
    same = torch.stack([would_do_the_same(own, target) for own, _ in predictions])
    if (lesson := exits.lesson(_verdict(errors.detach(), same, batch))) is not None:
        parts["exit_lesson"] = lesson
    return parts


def added_parts(policy: "GTrXLPolicy", exits: Exits, batch: Segments, vf_coef: float) -> dict[str, Tensor]:
    """Return all auxiliary losses of the transformer: `exit_parts`, and its "penalty", e.g. on long spans."""
    penalty = policy.transformer.penalty()
    return exit_parts(policy, exits, batch, vf_coef) | ({} if penalty is None else {"penalty": penalty})


def lead_of(policy: "GTrXLPolicy", output: Tensor) -> Tensor:
    """Return the difference of the two largest action probabilities: outputs (B, 1, C) -> (B, 1)."""
    logits = choices(policy.heads(output[:, 0])[0])
    return lead([each.softmax(dim=-1) for each in logits])[:, None]


def check_exits(core: TransformerSpec, action_space: spaces.Space[Any]) -> None:
    """Raise ValueError unless the core's exit rule can be evaluated step by step for the action space."""
    depth = core.depth
    if isinstance(depth, ExitDepth) and not depth.by_step:
        raise ValueError(
            f"{depth} decides exits by the mean over a sequence, but GTrXLPPO acts step by step; "
            f"use by='multinomial' or 'geometric'"
        )
    check_choices(depth, action_space)


def _heads(policy: "GTrXLPolicy", output: Tensor) -> tuple[Distribution, Tensor]:
    """Return `GTrXLPolicy.heads` with standard deviations detached, and as a new distribution object.

    SB3 reuses a single distribution object for all calls.
    """
    distribution, values = policy.heads(output)
    own = copy(distribution)
    if isinstance(own, DiagGaussianDistribution):
        own.distribution = Normal(own.distribution.mean, own.distribution.stddev.detach())
    return own, values


def _verdict(errors: Tensor, same: Tensor, batch: Segments) -> Verdict:
    """Build the targets of exit prediction; the last of N outputs is correct by definition.

    Args:
        errors: (N - 1, B T), losses of the earlier outputs.
        same: (N - 1, B T) bool, whether an earlier output has the same most likely action.
        batch: the minibatch.
    """
    shape = batch.index.shape
    likelihood = F.pad(-errors, (0, 0, 0, 1)).unflatten(1, shape)
    same = F.pad(same, (0, 0, 0, 1), value=True).unflatten(1, shape)
    return Verdict(likelihood, same, same, batch.index)
