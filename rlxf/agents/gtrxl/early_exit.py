"""Auxiliary losses for early exits: self-distillation from the last layer and exit prediction."""

from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import DiagGaussianDistribution, Distribution
from torch import Tensor
from torch.distributions import Normal
from torch.nn import functional as F

from rlxf.agents.calibration import check_exit_confidence
from rlxf.agents.common.losses import masked_mean
from rlxf.agents.gtrxl.distributions import choice_logits, divergence, same_most_likely_action
from rlxf.agents.gtrxl.rollout_buffer import SegmentBatch
from rlxf.attention import ExitTargets, TransformerSpec
from rlxf.attention.depth.base import ExitOutputs
from rlxf.attention.depth.calm import probability_margin

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.policy import GTrXLPolicy


def early_exit_losses(
    policy: "GTrXLPolicy", exits: ExitOutputs, batch: SegmentBatch, vf_coef: float
) -> dict[str, Tensor]:
    """Return auxiliary losses for early exits, by name; none if the core has no early exits.

    The rollout uses the last output, so PPO and distillation train the last output. Each earlier output n is
    trained with ``KL(last || n) + vf_coef (V_n - V_last)^2``, weighted by its loss weight divided by that of
    the last output. The sum is "exit_loss". The standard deviation of Box actions is shared by all outputs
    and gets no gradient from this KL, so only the last output controls exploration. "exit_lesson" is the loss
    that trains the depth controller when to exit.
    """
    if exits.auxiliary_loss is None:
        return {}
    *early, last = exits.outputs.flatten(1, 2)
    with torch.no_grad():
        target, value = _heads(policy, last)
    predictions = [_heads(policy, output) for output in early]
    errors = torch.stack(
        [divergence(own, target, 1.0) + vf_coef * (v - value).square() for own, v in predictions]
    )
    shares = exits.loss_weights[:-1] / exits.loss_weights[-1]
    parts = {"exit_loss": torch.stack([masked_mean(each, batch.weight) for each in errors]) @ shares}
    same = torch.stack([same_most_likely_action(own, target) for own, _ in predictions])
    if (lesson := exits.auxiliary_loss(_verdict(errors.detach(), same, batch))) is not None:
        parts["exit_lesson"] = lesson
    return parts


def auxiliary_losses(
    policy: "GTrXLPolicy", exits: ExitOutputs, batch: SegmentBatch, vf_coef: float
) -> dict[str, Tensor]:
    """Return all auxiliary losses of the transformer: `early_exit_losses`, and its "penalty", e.g. on
    long spans.
    """
    penalty = policy.transformer.penalty()
    return early_exit_losses(policy, exits, batch, vf_coef) | (
        {} if penalty is None else {"penalty": penalty}
    )


def exit_margin(policy: "GTrXLPolicy", output: Tensor) -> Tensor:
    """Return the difference of the two largest action probabilities: outputs (B, 1, C) -> (B, 1)."""
    logits = choice_logits(policy.heads(output[:, 0])[0])
    return probability_margin([each.softmax(dim=-1) for each in logits])[:, None]


def check_exits(core: TransformerSpec, action_space: spaces.Space[Any]) -> None:
    """Raise ValueError unless the core's exit rule can be evaluated step by step for the action space."""
    depth = core.depth
    if not depth.exits_token_by_token:
        raise ValueError(
            f"{depth} decides exits by the mean over a sequence, but GTrXLPPO acts step by step; "
            f"use by='multinomial' or 'geometric'"
        )
    check_exit_confidence(depth, action_space)


def _heads(policy: "GTrXLPolicy", output: Tensor) -> tuple[Distribution, Tensor]:
    """Return `GTrXLPolicy.heads` with standard deviations detached, and as a new distribution object.

    SB3 reuses a single distribution object for all calls.
    """
    distribution, values = policy.heads(output)
    own = copy(distribution)
    if isinstance(own, DiagGaussianDistribution):
        own.distribution = Normal(own.distribution.mean, own.distribution.stddev.detach())
    return own, values


def _verdict(errors: Tensor, same: Tensor, batch: SegmentBatch) -> ExitTargets:
    """Build the targets of exit prediction; the last of N outputs is correct by definition.

    Args:
        errors: (N - 1, B T), losses of the earlier outputs.
        same: (N - 1, B T) bool, whether an earlier output has the same most likely action.
        batch: the minibatch.
    """
    shape = batch.index.shape
    likelihood = F.pad(-errors, (0, 0, 0, 1)).unflatten(1, shape)
    same = F.pad(same, (0, 0, 0, 1), value=True).unflatten(1, shape)
    return ExitTargets(likelihood, same, same, batch.index)
