"""What is read off a state token: a distribution over actions."""

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
"""Range of the log standard deviation of a `Gaussian`, as in the code of Zheng et al. 2022."""


class Head(nn.Module, ABC):
    """A distribution over actions, from outputs y of the transformer."""

    @abstractmethod
    def error(self, y: Tensor, actions: Tensor) -> Tensor:
        """How badly y (..., C) foretells the actions of the data -> (...)."""

    @abstractmethod
    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Actions for y (E, C), as the data have them: the most likely ones, or a sample."""

    @abstractmethod
    def distance(self, y: Tensor, teacher: Self, wanted: Tensor, temperature: float) -> Tensor:
        """How far y (..., C) is from what a teacher's head makes of ``wanted`` (..., C') -> (...).

        The teacher gets no gradient. See `rlxf.agents.distillation.Distillation`.
        """


class RandomHead(Head):
    """A head that does not always act alike."""

    @abstractmethod
    def entropy(self, y: Tensor) -> Tensor:
        """Entropy of the actions for y (..., C) -> (...), in nats."""


class Point(Head):
    """``a = centre + radius tanh(W y + b)``; without tanh where the space has no bounds.

    The error is the squared error, between actions scaled to [-1, 1]. It always acts alike.

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

    def distance(self, y: Tensor, teacher: Self, wanted: Tensor, temperature: float) -> Tensor:
        """See `Head`; a point has no temperature."""
        with torch.no_grad():
            theirs = teacher._scaled(wanted)
        return squared_error(self._scaled(y), theirs)

    def _scaled(self, y: Tensor) -> Tensor:
        u = self.net(y)
        return torch.where(self.actions.bounded, u.tanh(), u)


class Gaussian(RandomHead):
    r"""``a = centre + radius tanh(u)``, ``u ~ N(mu(y), sigma(y))``; without tanh where there are no bounds.

    The error is the negative log likelihood of actions scaled to [-1, 1]. ``log sigma`` stays from -5 to 2,
    by tanh. The most likely action is taken at u = mu. The entropy of a squashed Gaussian has no closed
    form: it is estimated without bias by ``-log p`` of one sample, with gradient.

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

    def distance(self, y: Tensor, teacher: Self, wanted: Tensor, temperature: float) -> Tensor:
        """See `Head`."""
        with torch.no_grad():
            theirs = teacher._moments(wanted)
        return gaussian_kl(self._moments(y), theirs, temperature)

    def _moments(self, y: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = self.net(y).chunk(2, dim=-1)
        low, high = LOG_STD
        return mean, low + 0.5 * (high - low) * (raw.tanh() + 1)

    def _log_prob(self, mean: Tensor, log_std: Tensor, u: Tensor) -> Tensor:
        squashing = torch.where(self.actions.bounded, log_slope(u), 0)
        return (normal_log_prob(mean, log_std, u) - squashing).sum(dim=-1)


class Categorical(RandomHead):
    """``p = softmax(W y + b)``, one for each choice to be made. The error is the cross-entropy."""

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

    def distance(self, y: Tensor, teacher: Self, wanted: Tensor, temperature: float) -> Tensor:
        """See `Head`; summed over the choices."""
        with torch.no_grad():
            theirs = teacher.logits(wanted)
        pairs = zip(self.logits(y), theirs, strict=True)
        return torch.stack([softened_kl(own, their, temperature) for own, their in pairs]).sum(0)

    def logits(self, y: Tensor) -> tuple[Tensor, ...]:
        """y (..., C) -> one (..., A) for each choice."""
        logits: Tensor = self.net(y)
        return logits.split(self.actions.sizes, dim=-1)
