"""Generalized advantage estimation and PPO's objective, as pure functions of tensors."""

import torch
from torch import Tensor

from rlxf.agents.common.losses import masked_mean


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


def masked_std(x: Tensor, weight: Tensor) -> Tensor:
    """Standard deviation of x over the entries of weight 1."""
    centred = x - masked_mean(x, weight)
    return masked_mean(centred.square(), weight).sqrt()


def normalize_advantages(advantages: Tensor, weight: Tensor, epsilon: Tensor | float) -> Tensor:
    """``(A - mean) / (std + epsilon)`` over the entries of weight 1.

    Once a task is solved, all advantages are nearly 0. Division by their small standard deviation alone would
    amplify noise and degrade the policy; epsilon prevents it.
    """
    centred = advantages - masked_mean(advantages, weight)
    return centred / (masked_std(advantages, weight) + epsilon + 1e-8)


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
