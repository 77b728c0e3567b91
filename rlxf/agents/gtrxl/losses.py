"""Mathematics of PPO: generalized advantage estimation, the clipped objective, and losses of early exits."""

from dataclasses import dataclass

import torch
from stable_baselines3.common.distributions import Distribution
from torch import Tensor
from torch.nn import functional as F

from rlxf.agents.common.accumulation import Losses
from rlxf.agents.common.losses import masked_mean
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.rollout_buffer import SegmentBatch
from rlxf.attention import ExitTargets
from rlxf.attention.depth.base import ExitOutputs
from rlxf.utils.distributions import unvalidated_distributions


def discounted_sum(x: Tensor, discount: Tensor) -> Tensor:
    """``y_t = x_t + c_t * y_{t+1}`` along the first axis, with y = 0 after the end.

    A parallel scan: after n passes y_t contains 2^n terms, so there are log2(T) passes over (T, E).

    Args:
        x: (T, E).
        discount: c, (T, E).
    """
    shift = 1
    while shift < x.shape[0]:
        nearer, farther = x[:-shift] + discount[:-shift] * x[shift:], discount[:-shift] * discount[shift:]
        x = torch.cat([nearer, x[-shift:]])
        discount = torch.cat([farther, torch.zeros_like(discount[-shift:])])
        shift *= 2
    return x


def generalized_advantage_estimate(
    rewards: Tensor, values: Tensor, next_values: Tensor, dones: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    r"""``A_t = sum_l (gamma lambda)^l delta_{t+l}`` up to the end of the episode.

    ``delta_t = r_t + gamma V(s_{t+1}) - V(s_t)``, without V(s_{t+1}) if step t ends its episode. The reward
    of a truncated step must already include ``gamma V(last observation)``.

    Source: Schulman et al. 2016, arXiv:1506.02438, equation 16.

    Args:
        rewards: r, (T, E).
        values: V(s_t), (T, E).
        next_values: V(s_T), (E,), of the observations after the last step.
        dones: (T, E) bool, whether step t ended its episode.
        gamma: discount factor.
        gae_lambda: lambda.
    """
    not_done = (~dones).to(rewards.dtype)
    following = torch.cat([values[1:], next_values[None]])
    delta = rewards + gamma * following * not_done - values
    return discounted_sum(delta, gamma * gae_lambda * not_done)


def normalize_advantages(advantages: Tensor, weight: Tensor, epsilon: Tensor | float) -> Tensor:
    """``(A - mean) / (std + epsilon + min(1e-8, epsilon))`` over the entries of weight 1.

    Once a task is solved, all advantages are nearly 0. Division by their small standard deviation alone would
    amplify noise and degrade the policy; epsilon, which is above 0 and has the unit of the advantages,
    prevents it.
    """
    centered = advantages - masked_mean(advantages, weight)
    return centered / (masked_mean(centered.square(), weight).sqrt() + epsilon + min(1e-8, epsilon))


def clipped_values(values: Tensor, before: Tensor, clip_range: float | None) -> Tensor:
    """Clip values (N,) to those of the rollout, as in SB3: ``V_old + clip(V - V_old, -c, c)``.

    The gradient is 0 where the bound is exceeded.

    Args:
        values: V, (N,).
        before: V_old, (N,), values of the rollout.
        clip_range: c, in units of the values; None for no clipping.
    """
    if clip_range is None:
        return values
    return before + (values - before).clamp(-clip_range, clip_range)


def clipped_objective(ratio: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """``min(r A, clip(r, 1 - eps, 1 + eps) A)``, to be maximized.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7.
    """
    return torch.min(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages)


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """``(r - 1) - log r``: an unbiased and nonnegative estimate of KL(old || new).

    Source: Schulman 2020, "Approximating KL divergence", estimator k3.
    """
    return log_ratio.expm1() - log_ratio


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

    @unvalidated_distributions()
    def __call__(self, policy: GTrXLPolicy, batch: SegmentBatch) -> Losses:
        """Return means over the steps of weight 1 in a minibatch: "loss", and its terms with SB3's names."""
        latent, added = segment_outputs(policy, batch, self.vf_coef)
        distribution, values = policy.heads(latent)
        log_ratio = distribution.log_prob(batch.actions) - batch.log_probs
        ratio = log_ratio.exp()
        gain = masked_mean(clipped_objective(ratio, batch.advantages, self.clip_range), batch.weight)
        entropy = masked_mean(distribution.entropy(), batch.weight)  # type: ignore[arg-type]
        predictions, parts = self.prediction_losses(policy, latent, values, batch)
        loss = -gain + predictions - self.ent_coef * entropy
        parts |= {"policy_gradient_loss": -gain, "entropy_loss": -entropy}
        with torch.no_grad():
            parts["approx_kl"] = masked_mean(approximate_kl(log_ratio), batch.weight)
            parts["clip_fraction"] = masked_mean(((ratio - 1).abs() > self.clip_range).float(), batch.weight)
        return total_loss(policy, loss, parts, added)

    def prediction_losses(
        self, policy: GTrXLPolicy, latent: Tensor, values: Tensor, batch: SegmentBatch
    ) -> tuple[Tensor, Losses]:
        """Return the weighted sum of the losses of values and reconstructed observations, and each by name.

        Args:
            policy: the policy.
            latent: (N, C), outputs of the transformer.
            values: (N,), values of these outputs.
            batch: the minibatch.
        """
        values = clipped_values(values, batch.values, self.clip_range_vf)
        value_loss = masked_mean((batch.returns - values).square(), batch.weight)
        total = self.vf_coef * value_loss
        parts = {"value_loss": value_loss}
        if self.reconstruction_coef:
            error = masked_mean(policy.reconstruction_error(latent, batch.obs), batch.weight)
            total = total + self.reconstruction_coef * error
            parts["reconstruction_loss"] = error
        return total, parts


def segment_outputs(policy: GTrXLPolicy, batch: SegmentBatch, vf_coef: float) -> tuple[Tensor, Losses]:
    """Return the last outputs (N, C) of the transformer for a minibatch, and its auxiliary losses by name.

    They are `early_exit_losses`, and the "penalty" of the transformer, e.g. for long attention spans.
    """
    exits = policy.exit_outputs(batch.obs, batch.previous, batch.index, batch.state)
    penalty = policy.transformer.penalty()
    losses = early_exit_losses(policy, exits, batch, vf_coef)
    return exits.outputs[-1].flatten(0, 1), losses if penalty is None else losses | {"penalty": penalty}


def total_loss(policy: GTrXLPolicy, loss: Tensor, parts: Losses, added: Losses) -> Losses:
    """Return "loss" plus the auxiliary losses ``added``, all terms, and the mean depth if it is adaptive."""
    depth = policy.transformer.mean_depth()
    depths = {} if depth is None else {"mean_depth": depth}
    return {"loss": sum(added.values(), loss)} | parts | depths | added


def early_exit_losses(policy: GTrXLPolicy, exits: ExitOutputs, batch: SegmentBatch, vf_coef: float) -> Losses:
    """Return auxiliary losses for early exits, by name; none if the core has no early exits.

    The rollout uses the last output, so PPO and distillation train the last output. Each earlier output n is
    trained with ``KL(last || n) + vf_coef (V_n - V_last)^2``, weighted by its loss weight divided by that of
    the last output. The sum is "exit_loss". The standard deviation of Box actions gets no gradient from this
    KL, so only the last output controls exploration. It is shared by all outputs, but differs between them
    with ``use_sde``. "exit_prediction_loss" is the loss that trains the depth controller when to exit.
    """
    if exits.auxiliary_loss is None:
        return {}
    head = policy.action_head
    *early, last = exits.outputs.flatten(1, 2)
    with torch.no_grad():
        target, value = _heads(policy, last)
    predictions = [_heads(policy, output) for output in early]
    errors = torch.stack(
        [head.divergence(own, target, 1.0) + vf_coef * (v - value).square() for own, v in predictions]
    )
    loss_weights = exits.loss_weights[:-1] / exits.loss_weights[-1]
    parts = {"exit_loss": torch.stack([masked_mean(each, batch.weight) for each in errors]) @ loss_weights}
    same = torch.stack([head.same_most_likely_action(own, target) for own, _ in predictions])
    if (exit_loss := exits.auxiliary_loss(_exit_targets(errors.detach(), same, batch))) is not None:
        parts["exit_prediction_loss"] = exit_loss
    return parts


def _heads(policy: GTrXLPolicy, output: Tensor) -> tuple[Distribution, Tensor]:
    """Return `GTrXLPolicy.heads` with standard deviations detached."""
    distribution, values = policy.heads(output)
    return policy.action_head.detach_std(distribution), values


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
