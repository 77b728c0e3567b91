"""What Stable-Baselines3's distributions over actions are to one another."""

import torch
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
)
from torch import Tensor

from rlxf.agents.distillation import gaussian_kl, softened_kl

ALIKE = 0.5
"""Gaussians whose means are no farther apart than so many deviations would do the same."""


def divergence(student: Distribution, teacher: Distribution, temperature: float) -> Tensor:
    """``T^2 KL(teacher || student)`` of actions at a temperature: (N,). See `Distillation`."""
    if isinstance(student, DiagGaussianDistribution):
        return gaussian_kl(_moments(student), _moments(teacher), temperature)
    pairs = zip(choices(student), choices(teacher), strict=True)
    return torch.stack([softened_kl(own, theirs, temperature) for own, theirs in pairs]).sum(0)


def _moments(distribution: Distribution) -> tuple[Tensor, Tensor]:
    """Mean and log deviation, (N, A) each."""
    assert isinstance(distribution, DiagGaussianDistribution)
    normal = distribution.distribution
    return normal.mean, normal.stddev.log()


def choices(distribution: Distribution) -> list[Tensor]:
    """Logits (N, A) of each choice; what is on or off is a choice of two."""
    if isinstance(distribution, CategoricalDistribution):
        return [distribution.distribution.logits]
    if isinstance(distribution, MultiCategoricalDistribution):
        return [each.logits for each in distribution.distribution]
    assert isinstance(distribution, BernoulliDistribution)
    on = distribution.distribution.logits
    return list(torch.stack([torch.zeros_like(on), on], dim=-1).unbind(1))


def would_do_the_same(one: Distribution, other: Distribution) -> Tensor:
    """Whether the likeliest actions are the same, (N,) bool; for numbers, see `ALIKE`."""
    if isinstance(other, DiagGaussianDistribution):
        mean, log_std = _moments(other)
        apart = (_moments(one)[0] - mean).abs() / log_std.exp()
        return (apart <= ALIKE).all(dim=-1)
    pairs = zip(choices(one), choices(other), strict=True)
    return torch.stack([own.argmax(-1) == theirs.argmax(-1) for own, theirs in pairs]).all(0)
