"""What outputs before the last learn where tokens may leave early: to be like the last, and when to leave."""

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
    """What is added to a loss that is of the last output alone; nothing if no token leaves early.

    PPO compares what was done with what would be done, and what was done came of the last output. So each
    output n before it learns ``KL(last || n) + vf_coef (V_n - V_last)^2``, weighted by its share over that of
    the last one: "exit_loss". So it does where the last one learns from a teacher. The deviation of Box
    actions is one for all outputs, and this KL does not move it: how much is explored is up to the last one.
    "exit_lesson" is what the depth adds to learn when to leave.
    """
    if exits.lesson is None:
        return {}
    *early, last = exits.outputs.flatten(1, 2)
    with torch.no_grad():
        wanted, value = _heads(policy, last)
    found = [_heads(policy, output) for output in early]
    apart = torch.stack([divergence(own, wanted, 1.0) + vf_coef * (v - value).square() for own, v in found])
    shares = exits.shares[:-1] / exits.shares[-1]
    parts = {"exit_loss": torch.stack([average(each, batch.weight) for each in apart]) @ shares}
    same = torch.stack([would_do_the_same(own, wanted) for own, _ in found])
    if (lesson := exits.lesson(_verdict(apart.detach(), same, batch))) is not None:
        parts["exit_lesson"] = lesson
    return parts


def added_parts(policy: "GTrXLPolicy", exits: Exits, batch: Segments, vf_coef: float) -> dict[str, Tensor]:
    """What the transformer adds to any loss of a batch: `exit_parts`, and the "penalty" as of long spans."""
    penalty = policy.transformer.penalty()
    return exit_parts(policy, exits, batch, vf_coef) | ({} if penalty is None else {"penalty": penalty})


def lead_of(policy: "GTrXLPolicy", output: Tensor) -> Tensor:
    """How far the likeliest action is ahead, for outputs (B, 1, C): (B, 1)."""
    logits = choices(policy.heads(output[:, 0])[0])
    return lead([each.softmax(dim=-1) for each in logits])[:, None]


def check_exits(core: TransformerSpec, action_space: spaces.Space[Any]) -> None:
    """Raise ValueError unless a policy can say when a token of this core may leave."""
    depth = core.depth
    if isinstance(depth, ExitDepth) and not depth.by_step:
        raise ValueError(
            f"{depth} decides by the mean of a sequence, and GTrXLPPO acts step by step; "
            f"use by='multinomial' or 'geometric'"
        )
    check_choices(depth, action_space)


def _heads(policy: "GTrXLPolicy", output: Tensor) -> tuple[Distribution, Tensor]:
    """`GTrXLPolicy.heads`, no gradient to deviations; SB3 gives one object for all, and this is its own."""
    distribution, values = policy.heads(output)
    own = copy(distribution)
    if isinstance(own, DiagGaussianDistribution):
        own.distribution = Normal(own.distribution.mean, own.distribution.stddev.detach())
    return own, values


def _verdict(apart: Tensor, same: Tensor, batch: Segments) -> Verdict:
    """What came of N outputs, of which the last is right: apart and same (N - 1, B T)."""
    shape = batch.index.shape
    likelihood = F.pad(-apart, (0, 0, 0, 1)).unflatten(1, shape)
    same = F.pad(same, (0, 0, 0, 1), value=True).unflatten(1, shape)
    return Verdict(likelihood, same, same, batch.index)
