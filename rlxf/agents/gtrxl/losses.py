"""PPO's loss, and auxiliary losses: self-distillation of early exits, exit prediction and penalties."""

from copy import copy
from dataclasses import dataclass

import torch
from stable_baselines3.common.distributions import DiagGaussianDistribution, Distribution
from torch import Tensor
from torch.distributions import Normal
from torch.nn import functional as F

from rlxf.agents.common.losses import masked_mean
from rlxf.agents.gtrxl.gae import approximate_kl, clipped_objective, clipped_values
from rlxf.agents.gtrxl.heads import divergence, same_most_likely_action
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.rollout_buffer import SegmentBatch
from rlxf.attention import ExitTargets
from rlxf.attention.depth.base import ExitOutputs


@dataclass(frozen=True)
class PPOLoss:
    """``-clipped objective + vf_coef (V - return)^2 - ent_coef entropy + reconstruction_coef error``.

    Auxiliary losses of the transformer are added, e.g. "penalty" for long attention spans.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 9.

    Args:
        clip_range: epsilon of the clipped objective.
        clip_range_vf: largest difference of a value from that of the rollout, in units of the returns; None
            for no clipping.
        ent_coef: weight of the entropy.
        vf_coef: weight of the value loss, already divided by the variance of returns.
        reconstruction_coef: weight of the observation reconstruction loss.
    """

    clip_range: float
    clip_range_vf: float | None
    ent_coef: float
    vf_coef: float
    reconstruction_coef: float

    def __call__(self, policy: GTrXLPolicy, batch: SegmentBatch) -> dict[str, Tensor]:
        """Return means over the steps of weight 1 in a minibatch: "loss", and its terms with SB3's names."""
        exits = policy.exit_outputs(batch.obs, batch.previous, batch.index, batch.state)
        added = auxiliary_losses(policy, exits, batch, self.vf_coef)
        latent = exits.outputs[-1].flatten(0, 1)
        distribution, values = policy.heads(latent)
        log_ratio = distribution.log_prob(batch.actions) - batch.log_probs
        ratio = log_ratio.exp()
        gain = masked_mean(clipped_objective(ratio, batch.advantages, self.clip_range), batch.weight)
        values = clipped_values(values, batch.values, self.clip_range_vf)
        value_loss = masked_mean((batch.returns - values).square(), batch.weight)
        entropy = masked_mean(distribution.entropy(), batch.weight)  # type: ignore[arg-type]
        loss = -gain + self.vf_coef * value_loss - self.ent_coef * entropy
        parts = {"policy_gradient_loss": -gain, "value_loss": value_loss, "entropy_loss": -entropy}
        if self.reconstruction_coef:
            error = masked_mean(policy.reconstruction_error(latent, batch.obs), batch.weight)
            loss = loss + self.reconstruction_coef * error
            parts["reconstruction_loss"] = error
        for part in added.values():
            loss = loss + part
        parts |= added
        if (depth := policy.transformer.mean_depth()) is not None:
            parts["mean_depth"] = depth
        with torch.no_grad():
            parts["approx_kl"] = masked_mean(approximate_kl(log_ratio), batch.weight)
            parts["clip_fraction"] = masked_mean(((ratio - 1).abs() > self.clip_range).float(), batch.weight)
        return {"loss": loss} | parts


def early_exit_losses(
    policy: GTrXLPolicy, exits: ExitOutputs, batch: SegmentBatch, vf_coef: float
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
    loss_weights = exits.loss_weights[:-1] / exits.loss_weights[-1]
    parts = {"exit_loss": torch.stack([masked_mean(each, batch.weight) for each in errors]) @ loss_weights}
    same = torch.stack([same_most_likely_action(own, target) for own, _ in predictions])
    if (exit_loss := exits.auxiliary_loss(_exit_targets(errors.detach(), same, batch))) is not None:
        parts["exit_lesson"] = exit_loss
    return parts


def auxiliary_losses(
    policy: GTrXLPolicy, exits: ExitOutputs, batch: SegmentBatch, vf_coef: float
) -> dict[str, Tensor]:
    """Return all auxiliary losses of the transformer: `early_exit_losses`, and its "penalty", e.g. on
    long spans.
    """
    penalty = policy.transformer.penalty()
    return early_exit_losses(policy, exits, batch, vf_coef) | (
        {} if penalty is None else {"penalty": penalty}
    )


def _heads(policy: GTrXLPolicy, output: Tensor) -> tuple[Distribution, Tensor]:
    """Return `GTrXLPolicy.heads` with standard deviations detached, and as a new distribution object.

    SB3 reuses a single distribution object for all calls.
    """
    distribution, values = policy.heads(output)
    own = copy(distribution)
    if isinstance(own, DiagGaussianDistribution):
        own.distribution = Normal(own.distribution.mean, own.distribution.stddev.detach())
    return own, values


def _exit_targets(errors: Tensor, same: Tensor, batch: SegmentBatch) -> ExitTargets:
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
