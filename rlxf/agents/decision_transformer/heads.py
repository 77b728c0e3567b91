"""Action heads: distributions over actions given the output at a state token."""

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor, nn

from rlxf.agents.actions import BoxActions, ChoiceActions, picked
from rlxf.agents.decision_transformer.objective import (
    entropies,
    log_slope,
    normal_log_prob,
    unsquashed,
)
from rlxf.agents.distillation import gaussian_kl, softened_kl
from rlxf.agents.losses import cross_entropies, squared_error

LOG_STD = (-5.0, 2.0)
"""Range of the log standard deviation of `Gaussian`, as in the code of Zheng et al. 2022."""


class Head(nn.Module, ABC):
    """Base class of distributions over actions given transformer outputs y."""

    @abstractmethod
    def error(self, y: Tensor, actions: Tensor) -> Tensor:
        """Compute the prediction error of y (..., C) for the actions of the dataset -> (...)."""

    @abstractmethod
    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Return the most likely actions for y (E, C), or a sample, in the encoding of the dataset."""

    @abstractmethod
    def distance(self, y: Tensor, teacher: Self, teacher_y: Tensor, temperature: float) -> Tensor:
        """Compute the distillation distance of this head at y (..., C) from the teacher's head -> (...).

        ``teacher_y`` (..., C') are the teacher's outputs. The teacher receives no gradient. See
        `rlxf.agents.distillation.Distillation`.
        """


class RandomHead(Head):
    """Base class of stochastic heads."""

    @abstractmethod
    def entropy(self, y: Tensor) -> Tensor:
        """Compute the entropy of the actions for y (..., C) -> (...), in nats."""


class Point(Head):
    """Deterministic head ``a = centre + radius tanh(W y + b)``; without tanh where the space is unbounded.

    The error is the squared error between actions scaled to [-1, 1].

    Source: Chen et al. 2021, arXiv:2106.01345, section 3 and the authors' code.
    """

    def __init__(self, width: int, actions: BoxActions):
        super().__init__()
        self.actions = actions
        self.net = nn.Linear(width, actions.width)

    def error(self, y: Tensor, actions: Tensor) -> Tensor:
        """See `Head`."""
        return squared_error(self._scaled(y), self.actions(actions))

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """See `Head`."""
        return self.actions.back(self._scaled(y))

    def distance(self, y: Tensor, teacher: Self, teacher_y: Tensor, temperature: float) -> Tensor:
        """Compute the squared error; the temperature is ignored."""
        with torch.no_grad():
            target = teacher._scaled(teacher_y)
        return squared_error(self._scaled(y), target)

    def _scaled(self, y: Tensor) -> Tensor:
        u = self.net(y)
        return torch.where(self.actions.bounded, u.tanh(), u)


class Gaussian(RandomHead):
    r"""Squashed Gaussian head ``a = centre + radius tanh(u)``, ``u ~ N(mu(y), sigma(y))``.

    Unbounded dimensions have no tanh. The error is the negative log-likelihood of actions scaled to [-1, 1].
    ``log sigma`` is kept in [-5, 2] by a tanh. The deterministic action is that of u = mu. The entropy of a
    squashed Gaussian has no closed form; ``-log p`` of a reparameterized sample estimates it without bias.

    Source: Zheng et al. 2022, arXiv:2202.05607, section 4 and the authors' code.
    """

    def __init__(self, width: int, actions: BoxActions):
        super().__init__()
        self.actions = actions
        self.net = nn.Linear(width, 2 * actions.width)

    def error(self, y: Tensor, actions: Tensor) -> Tensor:
        """See `Head`."""
        scaled = self.actions(actions)
        u = torch.where(self.actions.bounded, unsquashed(scaled), scaled)
        return -self._log_prob(*self._moments(y), u)

    def entropy(self, y: Tensor) -> Tensor:
        """See `RandomHead`."""
        mean, log_std = self._moments(y)
        return -self._log_prob(mean, log_std, mean + log_std.exp() * torch.randn_like(mean))

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """See `Head`."""
        mean, log_std = self._moments(y)
        u = mean if deterministic else mean + log_std.exp() * torch.randn_like(mean)
        return self.actions.back(torch.where(self.actions.bounded, u.tanh(), u))

    def distance(self, y: Tensor, teacher: Self, teacher_y: Tensor, temperature: float) -> Tensor:
        """See `Head`."""
        with torch.no_grad():
            target = teacher._moments(teacher_y)
        return gaussian_kl(self._moments(y), target, temperature)

    def _moments(self, y: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = self.net(y).chunk(2, dim=-1)
        low, high = LOG_STD
        return mean, low + 0.5 * (high - low) * (raw.tanh() + 1)

    def _log_prob(self, mean: Tensor, log_std: Tensor, u: Tensor) -> Tensor:
        squashing = torch.where(self.actions.bounded, log_slope(u), 0)
        return (normal_log_prob(mean, log_std, u) - squashing).sum(dim=-1)


class Categorical(RandomHead):
    """Categorical head ``p = softmax(W y + b)``, one distribution per discrete component of an action.

    The error is the cross-entropy.
    """

    def __init__(self, width: int, actions: ChoiceActions):
        super().__init__()
        self.actions = actions
        self.net = nn.Linear(width, actions.width)

    def error(self, y: Tensor, actions: Tensor) -> Tensor:
        """See `Head`."""
        return cross_entropies(self.logits(y), self.actions.choices(actions))

    def entropy(self, y: Tensor) -> Tensor:
        """See `RandomHead`."""
        return entropies(self.logits(y))

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """See `Head`."""
        return self.actions.back(picked(self.logits(y), deterministic))

    def distance(self, y: Tensor, teacher: Self, teacher_y: Tensor, temperature: float) -> Tensor:
        """Compute the sum of the distances of the discrete components."""
        with torch.no_grad():
            target = teacher.logits(teacher_y)
        pairs = zip(self.logits(y), target, strict=True)
        return torch.stack([softened_kl(own, other, temperature) for own, other in pairs]).sum(0)

    def logits(self, y: Tensor) -> tuple[Tensor, ...]:
        """Compute the logits (..., A) of each discrete component for y (..., C)."""
        logits: Tensor = self.net(y)
        return logits.split(self.actions.sizes, dim=-1)
