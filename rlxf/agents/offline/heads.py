"""Action heads of offline agents and the training objectives that build them."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.agents.common.actions import BoxActions, DiscreteActions, select_choices
from rlxf.agents.common.losses import categorical_kl, cross_entropies, gaussian_kl, masked_mean, squared_error

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


@dataclass(frozen=True)
class Imitation:
    """Behavior cloning: ``mean of error(a_t)`` over the real (unpadded) steps.

    The error is the squared error for Box actions and the cross-entropy for discrete actions.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3.
    """

    paper: ClassVar[str] = "Chen et al. 2021, arXiv:2106.01345"

    def build(self, width: int, actions: BoxActions | DiscreteActions) -> "ImitationLoss":
        """Build the loss and its head."""
        head: type[Any] = actions.select(continuous=DeterministicHead, discrete=CategoricalHead)
        return ImitationLoss(head(width, actions))


@dataclass(frozen=True)
class MaximumEntropy:
    r"""Maximum entropy: ``mean of -log p(a_t) - lambda H`` over the real (unpadded) steps.

    lambda > 0 is the dual variable of the constraint ``H >= beta`` on the entropy H. It is trained jointly
    and minimizes ``lambda (H - beta)``, so it grows while the entropy is below beta. Box actions are drawn
    from a squashed Gaussian.

    Source: Zheng et al. 2022, arXiv:2202.05607, section 4, equations 6 to 8.

    Args:
        temperature: initial lambda, which is logged as ``ent_coef``; not a softmax temperature.
        target_entropy: beta, in nats. None: -A for Box actions of A dimensions, as in the paper; a fifth of
            the largest entropy for discrete actions.

    Raises:
        ValueError: if temperature is not finite and more than 0, or target_entropy is not finite.
    """

    paper: ClassVar[str] = "Zheng et al. 2022, arXiv:2202.05607"
    temperature: float = 0.1
    target_entropy: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and more than 0, got {self.temperature}")
        if self.target_entropy is not None and not math.isfinite(self.target_entropy):
            raise ValueError(f"target_entropy must be finite, or None, got {self.target_entropy}")

    def build(self, width: int, actions: BoxActions | DiscreteActions) -> "MaximumEntropyLoss":
        """Build the loss and its head."""
        head: type[Any] = actions.select(continuous=SquashedGaussianHead, discrete=CategoricalHead)
        return MaximumEntropyLoss(head(width, actions), self.temperature, self.target_entropy)


class ImitationLoss(nn.Module):
    """Loss of `Imitation` with its action head."""

    def __init__(self, head: Head):
        super().__init__()
        self.head = head

    def forward(self, y: Tensor, actions: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """Compute "loss" from y (..., C), the actions of the dataset, and weights (...), 0 for padding."""
        return {"loss": masked_mean(self.head.error(y, actions), weight)}


class MaximumEntropyLoss(nn.Module):
    """Loss of `MaximumEntropy` with its action head and log lambda."""

    def __init__(self, head: StochasticHead, temperature: float, target_entropy: float | None):
        super().__init__()
        self.head = head
        self.target_entropy = head.default_target_entropy() if target_entropy is None else target_entropy
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))

    def forward(self, y: Tensor, actions: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """Compute "loss" and its parts from y (..., C), the actions of the dataset, and weights (...).

        Padding has weight 0.
        """
        error = masked_mean(self.head.error(y, actions), weight)
        entropy = masked_mean(self.head.entropy(y), weight)
        temperature = self.log_temperature.exp()
        dual = temperature * (entropy.detach() - self.target_entropy)
        parts = {"nll": error, "entropy": entropy, "ent_coef": temperature, "ent_coef_loss": dual}
        return {"loss": error - temperature.detach() * entropy + dual} | parts


Objective: TypeAlias = Imitation | MaximumEntropy
OBJECTIVES: dict[str, type[Objective]] = {choice.__name__: choice for choice in (Imitation, MaximumEntropy)}


def objective_from_json(data: dict[str, Any]) -> Objective:
    """Restore an objective from the result of `rlxf.attention.registry.technique_to_json`.

    Raises:
        ValueError: if the name is unknown.
    """
    options = dict(data)
    name = options.pop("name", None)
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; use one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name](**options)
