"""Action heads of offline agents."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.agents.common.actions import BoxActions, DiscreteActions, select_choices
from rlxf.agents.common.losses import categorical_kl, cross_entropies, gaussian_kl, squared_error

MAX_SQUASHED_ACTION = 1 - 1e-6
"""Largest absolute value of a squashed action before atanh, which is infinite at 1."""


def normal_log_prob(mean: Tensor, log_std: Tensor, x: Tensor) -> Tensor:
    """Compute ``log N(x; mean, std)`` elementwise."""
    return -0.5 * ((x - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)


def log_tanh_derivative(u: Tensor) -> Tensor:
    """Compute ``log tanh'(u) = log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u))``, stable for large u."""
    return 2 * (math.log(2) - u - F.softplus(-2 * u))


def clamped_atanh(action: Tensor) -> Tensor:
    """Compute ``atanh`` of actions clamped to [-(1 - 1e-6), 1 - 1e-6]."""
    return action.clamp(-MAX_SQUASHED_ACTION, MAX_SQUASHED_ACTION).atanh()


def categorical_entropy(logits: tuple[Tensor, ...]) -> Tensor:
    """Compute ``-sum_i sum_c p_i(c) log p_i(c)``: n tensors of logits (..., N_i) -> (...)."""
    logs = [x.log_softmax(dim=-1) for x in logits]
    return torch.stack([-(log.exp() * log).sum(dim=-1) for log in logs]).sum(0)


TARGET_NOISE, MAX_TARGET_NOISE = 0.2, 0.5
"""Standard deviation and largest absolute value of noise on actions of targets, scaled to [-1, 1]."""
LOG_STD_RANGE = (-5.0, 2.0)
"""Range of the log standard deviation of `SquashedGaussianHead`, as in the code of Zheng et al. 2022."""


class Head(nn.Module, ABC):
    """Base class of distributions over actions given transformer outputs y.

    Args:
        width: width of the transformer.
        actions: encoding of actions.
    """

    actions: BoxActions | DiscreteActions
    parameters_per_action: ClassVar[int] = 1
    """Number of outputs of the linear layer for each number in an encoded action."""

    def __init__(self, width: int, actions: BoxActions | DiscreteActions):
        super().__init__()
        self.actions = actions
        self.net = nn.Linear(width, self.parameters_per_action * actions.width)

    @abstractmethod
    def error(self, y: Tensor, actions: Tensor) -> Tensor:
        """Compute the prediction error of y (..., C) for the actions of the dataset -> (...)."""

    @abstractmethod
    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Return the most likely actions for y (..., C), or a sample, in the dataset's encoding."""

    def explore(self, y: Tensor, noise: float) -> Tensor:
        """Return actions for y (..., C) that explore, in the dataset's encoding: by default samples.

        Args:
            y: outputs of the transformer.
            noise: standard deviation of the noise on actions of deterministic heads, scaled to [-1, 1].
        """
        return self.choose(y, deterministic=False)

    @property
    def explores_with_noise(self) -> bool:
        """True if `explore` adds noise to actions, False if it samples them."""
        return type(self).explore is not Head.explore

    @abstractmethod
    def network_action(self, y: Tensor) -> Tensor:
        """Return the action for y (..., C) as a differentiable input (..., A) of a critic.

        It is the deterministic action scaled to [-1, 1], or the probabilities of all choices.
        """

    def add_target_noise(self, action: Tensor) -> Tensor:
        """Add noise to an action (..., A) of a critic's target; by default none."""
        return action

    @abstractmethod
    def distillation_loss(self, y: Tensor, teacher: Self, teacher_y: Tensor, temperature: float) -> Tensor:
        """Compute the distillation distance of this head at y (..., C) from the teacher's head -> (...).

        ``teacher_y`` (..., C') are the teacher's outputs. The teacher receives no gradient. See
        `rlxf.agents.common.losses.Distillation`.
        """

    def logits(self, y: Tensor) -> tuple[Tensor, ...]:
        """Compute the logits (..., A) of each discrete component for y (..., C).

        Raises:
            TypeError: if the actions are continuous.
        """
        raise TypeError(f"{type(self).__name__} is for continuous actions and has no logits")


class StochasticHead(Head):
    """Base class of stochastic heads."""

    @abstractmethod
    def entropy(self, y: Tensor) -> Tensor:
        """Compute the entropy of the actions for y (..., C) -> (...), in nats."""

    @abstractmethod
    def default_target_entropy(self) -> float:
        """Return the lower bound on the entropy that `MaximumEntropy` uses by default, in nats."""


class DeterministicHead(Head):
    """Deterministic head ``a = center + radius tanh(W y + b)``; without tanh where the space is unbounded.

    The error is the squared error between actions scaled to [-1, 1].

    Source: Chen et al. 2021, arXiv:2106.01345, section 3 and the authors' code.
    """

    actions: BoxActions

    def error(self, y: Tensor, actions: Tensor) -> Tensor:
        return squared_error(self._scaled(y), self.actions(actions))

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        return self.actions.unscale(self._scaled(y))

    def explore(self, y: Tensor, noise: float) -> Tensor:
        """Add Gaussian noise, without bounds; source: Fujimoto et al. 2018, arXiv:1802.09477, appendix C."""
        scaled = self._scaled(y)
        return self.actions.unscale(scaled + noise * torch.randn_like(scaled))

    def network_action(self, y: Tensor) -> Tensor:
        return self._scaled(y)

    def add_target_noise(self, action: Tensor) -> Tensor:
        """Add clipped Gaussian noise; source: Fujimoto et al. 2018, arXiv:1802.09477, section 5.3."""
        noise = (TARGET_NOISE * torch.randn_like(action)).clamp(-MAX_TARGET_NOISE, MAX_TARGET_NOISE)
        noisy = action + noise
        return torch.where(self.actions.bounded, noisy.clamp(-1, 1), noisy)

    def distillation_loss(self, y: Tensor, teacher: Self, teacher_y: Tensor, temperature: float) -> Tensor:
        """Compute the squared error; the temperature is ignored."""
        with torch.no_grad():
            target = teacher._scaled(teacher_y)
        return squared_error(self._scaled(y), target)

    def _scaled(self, y: Tensor) -> Tensor:
        u = self.net(y)
        return torch.where(self.actions.bounded, u.tanh(), u)


class SquashedGaussianHead(StochasticHead):
    r"""Squashed Gaussian head ``a = center + radius tanh(u)``, ``u ~ N(mu(y), sigma(y))``.

    Unbounded dimensions have no tanh. The error is the negative log-likelihood of actions scaled to [-1, 1].
    ``log sigma`` is kept in [-5, 2] by a tanh. The deterministic action is that of u = mu. The entropy of a
    squashed Gaussian has no closed form; ``-log p`` of a reparameterized sample estimates it without bias.

    Source: Zheng et al. 2022, arXiv:2202.05607, section 4 and the authors' code.
    """

    actions: BoxActions
    parameters_per_action = 2

    def error(self, y: Tensor, actions: Tensor) -> Tensor:
        scaled = self.actions(actions)
        u = torch.where(self.actions.bounded, clamped_atanh(scaled), scaled)
        return -self._log_prob(*self._moments(y), u)

    def entropy(self, y: Tensor) -> Tensor:
        mean, log_std = self._moments(y)
        return -self._log_prob(mean, log_std, mean + log_std.exp() * torch.randn_like(mean))

    def default_target_entropy(self) -> float:
        """Return -A for actions of A dimensions, as in the paper."""
        return -float(self.actions.width)

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        mean, log_std = self._moments(y)
        u = mean if deterministic else mean + log_std.exp() * torch.randn_like(mean)
        return self.actions.unscale(torch.where(self.actions.bounded, u.tanh(), u))

    def network_action(self, y: Tensor) -> Tensor:
        mean, _ = self._moments(y)
        return torch.where(self.actions.bounded, mean.tanh(), mean)

    def distillation_loss(self, y: Tensor, teacher: Self, teacher_y: Tensor, temperature: float) -> Tensor:
        with torch.no_grad():
            target = teacher._moments(teacher_y)
        return gaussian_kl(self._moments(y), target, temperature)

    def _moments(self, y: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = self.net(y).chunk(2, dim=-1)
        low, high = LOG_STD_RANGE
        return mean, low + 0.5 * (high - low) * (raw.tanh() + 1)

    def _log_prob(self, mean: Tensor, log_std: Tensor, u: Tensor) -> Tensor:
        squashing = torch.where(self.actions.bounded, log_tanh_derivative(u), 0)
        return (normal_log_prob(mean, log_std, u) - squashing).sum(dim=-1)


class CategoricalHead(StochasticHead):
    """Categorical head ``p = softmax(W y + b)``, one distribution per discrete component of an action.

    The error is the cross-entropy.
    """

    actions: DiscreteActions

    def error(self, y: Tensor, actions: Tensor) -> Tensor:
        return cross_entropies(self.logits(y), self.actions.to_choices(actions))

    def entropy(self, y: Tensor) -> Tensor:
        return categorical_entropy(self.logits(y))

    def default_target_entropy(self) -> float:
        """Return a fifth of the largest entropy."""
        return 0.2 * sum(map(math.log, self.actions.sizes))

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        return self.actions.from_choices(select_choices(self.logits(y), deterministic))

    def network_action(self, y: Tensor) -> Tensor:
        return torch.cat([x.softmax(dim=-1) for x in self.logits(y)], dim=-1)

    def distillation_loss(self, y: Tensor, teacher: Self, teacher_y: Tensor, temperature: float) -> Tensor:
        """Compute the sum of the distances of the discrete components."""
        with torch.no_grad():
            target = teacher.logits(teacher_y)
        pairs = zip(self.logits(y), target, strict=True)
        return torch.stack([categorical_kl(own, other, temperature) for own, other in pairs]).sum(0)

    def logits(self, y: Tensor) -> tuple[Tensor, ...]:
        """Compute the logits (..., A) of each discrete component for y (..., C)."""
        logits: Tensor = self.net(y)
        return logits.split(self.actions.sizes, dim=-1)
