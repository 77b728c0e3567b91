"""Action heads of GTrXLPolicy: the kinds of SB3's action distributions, and what differs between them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from typing import Any, Generic, TypeVar

import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
    make_proba_distribution,
)
from torch import Tensor, nn
from torch.distributions import Normal

from rlxf.agents.common.losses import categorical_kl, gaussian_kl
from rlxf.agents.gtrxl.state_dependent_noise import StateDependentNoise, mean_action_std
from rlxf.attention.depth.calm import probability_margin

SAME_ACTION_STDS = 0.5
"""Largest difference of Gaussian means that count as the same action, in standard deviations."""

AnyDistribution = TypeVar("AnyDistribution", bound=Distribution)
GaussianDistribution = TypeVar("GaussianDistribution", bound=DiagGaussianDistribution)


DistributionOf = Callable[[Tensor], Distribution]


class ActionHead(ABC, Generic[AnyDistribution]):
    """Action head without parameters: the policy owns the action layer and the log standard deviations.

    Args:
        empty: distribution without parameters, which `distribution` copies.
    """

    def __init__(self, empty: AnyDistribution):
        self._empty = empty

    @abstractmethod
    def build(self, width: int, log_std_init: float) -> tuple[nn.Module, nn.Parameter | None]:
        """Return the action layer and the log standard deviations; None for discrete actions.

        Args:
            width: features C of the transformer's outputs.
            log_std_init: initial log standard deviation of Box actions.
        """

    @abstractmethod
    def distribution(self, parameters: Tensor, log_std: Any, latent: Tensor) -> AnyDistribution:
        """Return N action distributions, as a new object.

        Args:
            parameters: (N, P), outputs of the action layer.
            log_std: log standard deviations of the policy; None for discrete actions.
            latent: (N, C), outputs of the transformer.
        """

    @abstractmethod
    def divergence(self, student: AnyDistribution, teacher: AnyDistribution, temperature: float) -> Tensor:
        """``T^2 KL(teacher || student)`` of distributions at temperature T: (N,). See `Distillation`."""

    @abstractmethod
    def same_most_likely_action(self, one: AnyDistribution, other: AnyDistribution) -> Tensor:
        """Return whether the most likely actions are the same, (N,) bool."""

    def mode(self, latent: Tensor, layer: nn.Module, distribution: DistributionOf) -> Tensor:
        """Return the most likely actions (N, ...), by default those of the distributions.

        Args:
            latent: (N, C), outputs of the transformer.
            layer: the action layer.
            distribution: function that returns the distributions of outputs of the transformer.
        """
        return distribution(latent).mode()

    def explore(self, distribution: AnyDistribution) -> Tensor:
        """Sample the actions (E, ...) of a step of a rollout."""
        return distribution.sample()

    def reset_noise(self, log_std: Any, n_envs: int) -> None:
        """Draw the noise of `explore` in ``n_envs`` environments; by default each sample draws its own."""

    def mean_std(self, log_std: Any) -> Tensor | None:
        """Return the mean standard deviation of the actions, a scalar; None for discrete actions."""
        return None

    def detach_std(self, distribution: AnyDistribution) -> AnyDistribution:
        """Return a distribution without gradient for its standard deviations, if it has any."""
        return distribution

    def choice_logits(self, distribution: AnyDistribution) -> list[Tensor]:
        """Return the logits (N, A) of each choice.

        Raises:
            TypeError: if the actions are not discrete.
        """
        raise TypeError(f"{type(distribution).__name__} has no logits")

    def probability_margins(self, distribution: AnyDistribution) -> Tensor:
        """Return the confidence of discrete actions, (N,): see `probability_margin`."""
        return probability_margin([each.softmax(dim=-1) for each in self.choice_logits(distribution)])


class DiscreteHead(ActionHead[AnyDistribution]):
    """Head for actions that consist of choices; a subclass returns the logits of each choice."""

    def build(self, width: int, log_std_init: float) -> tuple[nn.Module, None]:
        net: Any = self._empty.proba_distribution_net(width)
        return net, None

    def distribution(self, parameters: Tensor, log_std: Any, latent: Tensor) -> AnyDistribution:
        return copy(self._empty).proba_distribution(parameters)

    def divergence(self, student: AnyDistribution, teacher: AnyDistribution, temperature: float) -> Tensor:
        pairs = zip(self.choice_logits(student), self.choice_logits(teacher), strict=True)
        return torch.stack([categorical_kl(own, target, temperature) for own, target in pairs]).sum(0)

    def same_most_likely_action(self, one: AnyDistribution, other: AnyDistribution) -> Tensor:
        pairs = zip(self.choice_logits(one), self.choice_logits(other), strict=True)
        return torch.stack([x.argmax(-1) == y.argmax(-1) for x, y in pairs]).all(0)


class CategoricalHead(DiscreteHead[CategoricalDistribution]):
    """Head for Discrete actions."""

    def mode(self, latent: Tensor, layer: nn.Module, distribution: DistributionOf) -> Tensor:
        """Return the choices with the largest logits, which need no normalization."""
        logits: Tensor = layer(latent)
        return logits.argmax(dim=-1)

    def choice_logits(self, distribution: CategoricalDistribution) -> list[Tensor]:
        return [distribution.distribution.logits]


class MultiCategoricalHead(DiscreteHead[MultiCategoricalDistribution]):
    """Head for MultiDiscrete actions."""

    def choice_logits(self, distribution: MultiCategoricalDistribution) -> list[Tensor]:
        return [each.logits for each in distribution.distribution]


class BernoulliHead(DiscreteHead[BernoulliDistribution]):
    """Head for MultiBinary actions."""

    def choice_logits(self, distribution: BernoulliDistribution) -> list[Tensor]:
        """Return the logits (N, 2) of each bit, a choice between two."""
        on = distribution.distribution.logits
        return list(torch.stack([torch.zeros_like(on), on], dim=-1).unbind(1))


class GaussianHead(ActionHead[GaussianDistribution]):
    """Head for Box actions with Gaussian noise."""

    def build(self, width: int, log_std_init: float) -> tuple[nn.Module, nn.Parameter]:
        return self._empty.proba_distribution_net(width, log_std_init)

    def distribution(self, parameters: Tensor, log_std: Tensor, latent: Tensor) -> GaussianDistribution:
        return copy(self._empty).proba_distribution(parameters, log_std)

    def mode(self, latent: Tensor, layer: nn.Module, distribution: DistributionOf) -> Tensor:
        """Return the means, which are the outputs of the layer."""
        means: Tensor = layer(latent)
        return means

    def mean_std(self, log_std: Tensor) -> Tensor:
        return mean_action_std(log_std)

    def detach_std(self, distribution: GaussianDistribution) -> GaussianDistribution:
        normal = distribution.distribution
        distribution.distribution = Normal(normal.mean, normal.stddev.detach())
        return distribution

    def divergence(
        self, student: GaussianDistribution, teacher: GaussianDistribution, temperature: float
    ) -> Tensor:
        return gaussian_kl(_moments(student), _moments(teacher), temperature)

    def same_most_likely_action(self, one: GaussianDistribution, other: GaussianDistribution) -> Tensor:
        """Return whether the means differ by at most `SAME_ACTION_STDS`, (N,) bool."""
        mean, log_std = _moments(other)
        distance = (_moments(one)[0] - mean).abs() / log_std.exp()
        return (distance <= SAME_ACTION_STDS).all(dim=-1)


class StateDependentHead(GaussianHead[StateDependentNoise]):
    """Head for Box actions with `StateDependentNoise`."""

    def distribution(self, parameters: Tensor, log_std: Tensor, latent: Tensor) -> StateDependentNoise:
        return copy(self._empty).proba_distribution(parameters, log_std, latent)

    def explore(self, distribution: StateDependentNoise) -> Tensor:
        """Return the actions with the noise of `reset_noise`."""
        return distribution.explore()

    def reset_noise(self, log_std: Tensor, n_envs: int) -> None:
        self._empty.draw_noise(log_std, n_envs)


def _moments(distribution: DiagGaussianDistribution) -> tuple[Tensor, Tensor]:
    """Return mean and log standard deviation, (N, A) each."""
    normal = distribution.distribution
    return normal.mean, normal.stddev.log()


HEADS: dict[type[spaces.Space[Any]], type[ActionHead[Any]]] = {
    spaces.Box: GaussianHead,
    spaces.Discrete: CategoricalHead,
    spaces.MultiDiscrete: MultiCategoricalHead,
    spaces.MultiBinary: BernoulliHead,
}
"""Heads without state-dependent noise by the kind of action space."""


def make_action_head(space: spaces.Space[Any], use_sde: bool) -> ActionHead[Any]:
    """Return the head for an action space; with ``use_sde``, which needs Box, state-dependent noise."""
    if use_sde:
        return StateDependentHead(StateDependentNoise(spaces.utils.flatdim(space)))
    empty = make_proba_distribution(space)
    return next(head(empty) for kind, head in HEADS.items() if isinstance(space, kind))
