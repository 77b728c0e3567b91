"""Comparison of Stable-Baselines3's action distributions."""

import torch
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
)
from torch import Tensor

from rlxf.agents.common.losses import categorical_kl, gaussian_kl
from rlxf.attention.depth.calm import probability_margin

SAME_ACTION_STDS = 0.5
"""Largest difference of Gaussian means that count as the same action, in standard deviations."""


def divergence(student: Distribution, teacher: Distribution, temperature: float) -> Tensor:
    """``T^2 KL(teacher || student)`` of action distributions at temperature T: (N,). See `Distillation`."""
    if isinstance(student, DiagGaussianDistribution):
        return gaussian_kl(_moments(student), _moments(teacher), temperature)
    pairs = zip(choice_logits(student), choice_logits(teacher), strict=True)
    return torch.stack([categorical_kl(own, target, temperature) for own, target in pairs]).sum(0)


def _moments(distribution: Distribution) -> tuple[Tensor, Tensor]:
    """Return mean and log standard deviation, (N, A) each."""
    assert isinstance(distribution, DiagGaussianDistribution)
    normal = distribution.distribution
    return normal.mean, normal.stddev.log()


def choice_logits(distribution: Distribution) -> list[Tensor]:
    """Return the logits (N, A) of each choice; a bit is a choice between two."""
    if isinstance(distribution, CategoricalDistribution):
        return [distribution.distribution.logits]
    if isinstance(distribution, MultiCategoricalDistribution):
        return [each.logits for each in distribution.distribution]
    assert isinstance(distribution, BernoulliDistribution)
    on = distribution.distribution.logits
    return list(torch.stack([torch.zeros_like(on), on], dim=-1).unbind(1))


def probability_margins(distribution: Distribution) -> Tensor:
    """Return the confidence of discrete actions, (N,): see `probability_margin`."""
    return probability_margin([each.softmax(dim=-1) for each in choice_logits(distribution)])


def same_most_likely_action(one: Distribution, other: Distribution) -> Tensor:
    """Return whether the most likely actions are the same, (N,) bool; for Box actions see
    `SAME_ACTION_STDS`.
    """
    if isinstance(other, DiagGaussianDistribution):
        mean, log_std = _moments(other)
        distance = (_moments(one)[0] - mean).abs() / log_std.exp()
        return (distance <= SAME_ACTION_STDS).all(dim=-1)
    pairs = zip(choice_logits(one), choice_logits(other), strict=True)
    return torch.stack([x.argmax(-1) == y.argmax(-1) for x, y in pairs]).all(0)
