"""Critic of offline agents: twin action values, target networks, n-step targets, and a divergence check."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlxf.agents.common.actions import BoxActions, DiscreteActions
from rlxf.utils.warnings import warn_user

AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class CriticWindows:
    """Part of a batch from which a critic learns: B windows of K steps, padded on the left.

    Args:
        features: features of the observations, (B, K, F).
        actions: actions of the data as inputs of a network, (B, K, A).
        rewards: rewards, divided by the return scale, (B, K). Those of the last step are used only where
            the episode terminates after it.
        mask: (B, K) bool, False for padding.
        terminated: (B,) bool, True if the episode terminates after the last step of the window.
    """

    features: Tensor
    actions: Tensor
    rewards: Tensor
    mask: Tensor
    terminated: Tensor


class TwinQ(nn.Module):
    """Two action values ``Q(x, a)``, multilayer perceptrons over features x and actions a.

    For Box actions, a is an input: actions scaled to [-1, 1]. For discrete actions, the networks have one
    output for each choice, and ``Q(x, p) = sum_c p_c Q_c(x)`` for one-hot actions or probabilities p; with
    several choices, the value is a sum over them.

    Args:
        features: number of features F.
        actions: encoding of actions.
        hidden_sizes: widths of the hidden layers, each followed by layer normalization and ReLU.
    """

    def __init__(self, features: int, actions: BoxActions | DiscreteActions, hidden_sizes: Sequence[int]):
        super().__init__()
        self.discrete = actions.select(continuous=False, discrete=True)
        inputs, outputs = (features, actions.width) if self.discrete else (features + actions.width, 1)
        sizes = (inputs, *hidden_sizes)
        self.nets = nn.ModuleList(_perceptron(sizes, outputs) for _ in range(2))

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        """Compute both values: x (..., F) and a (..., A) -> (2, ...)."""
        if self.discrete:
            return torch.stack([(net(x) * a).sum(dim=-1) for net in self.nets])
        inputs = torch.cat([x, a], dim=-1)
        return torch.stack([net(inputs)[..., 0] for net in self.nets])


def _perceptron(sizes: Sequence[int], outputs: int) -> nn.Sequential:
    layers = [
        nn.Sequential(nn.Linear(size, width), nn.LayerNorm(width), nn.ReLU())
        for size, width in pairwise(sizes)
    ]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def frozen_copy(module: AnyModule) -> AnyModule:
    """Return a copy of a module with its parameters, in the same order, as buffers."""
    copied = deepcopy(module)
    for part in copied.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, parameter.detach())
    return copied


def window_targets(
    rewards: Tensor, values: Tensor, terminated: Tensor, discount: float, n_steps: int | None = None
) -> Tensor:
    r"""Compute ``sum_(j=i)^(e-1) g^(j-i) r_j + g^(e-i) V_e`` at each step i of a window that ends at step n.

    Step e is n, or with ``n_steps`` m the step ``min(i + m, n)``. If the episode terminates after step n, the
    target is ``sum_(j=i)^n g^(j-i) r_j`` wherever it would otherwise count the rewards up to step n: for all
    i, or with m for ``i > n - m``.

    Source: Hu et al. 2024, arXiv:2405.17098, section 4.2, without m; Sutton 1988 for the m-step return.

    Args:
        rewards: (B, K).
        values: V at each step, (B, K); without ``n_steps``, only the last column is used, and others may be
            left out.
        terminated: (B,) bool.
        discount: g.
        n_steps: largest number of rewards m in a target; None for all up to the last step of the window.
    """
    steps = torch.arange(rewards.shape[1], device=rewards.device)
    distance = steps[None, :] - steps[:, None]
    reach = len(steps) if n_steps is None else n_steps
    counted = (distance >= 0) & (distance < reach)
    weights = rewards.new_full((), discount) ** distance.clamp(min=0) * counted
    last = torch.where(terminated, rewards[:, -1], values[:, -1])
    targets = torch.cat([rewards[:, :-1], last[:, None]], dim=1) @ weights.T
    if reach >= len(steps):
        return targets
    return targets + discount**reach * functional.pad(values[:, reach:], (0, reach))


DIVERGENCE_RATIO = 10.0
"""Divergence threshold: mean |Q| in multiples of the largest value that the rewards allow."""
SMALL_SCALE = 0.01
"""Fraction of the scale of the data below which a given scale of returns causes a warning."""


class DivergenceCheck:
    """Warn once when action values exceed what the rewards allow.

    With rewards of at most ``|r|`` and discount g, no policy has a value above ``|r| / (1 - g)``. The values
    diverge if the mean of |Q| over a batch exceeds 10 times this bound, for the largest reward of the
    training so far. Nothing is checked before the first reward: a loaded critic has learned from others. A
    bound below 1 counts as 1: the returns of the data, in units of their scale, and the values of untrained
    networks are of this order. Values that are not finite stop the training with a
    `NumericalError` in any case (`rlxf.agents.common.numerics.clip_grad_norm_checked`).

    Args:
        discount: g, from 0 to below 1.
    """

    def __init__(self, discount: float):
        self.discount = discount
        self.largest_reward = 0.0
        self._warned = False
        self._unread: Tensor | None = None

    def check(self, newest: Tensor) -> None:
        """Check an update; on an accelerator the update before, whose numbers have arrived by now.

        Args:
            newest: mean of |Q| over the batch, and its `largest_reward`, (2,).
        """
        numbers: Tensor | None = newest.to("cpu", non_blocking=True)
        if newest.device.type != "cpu":
            numbers, self._unread = self._unread, numbers
        if numbers is not None:
            self._check(*numbers.tolist())

    def _check(self, value: float, reward: float) -> None:
        self.largest_reward = max(self.largest_reward, reward)
        bound = self.largest_reward / (1 - self.discount)
        exceeds = value > DIVERGENCE_RATIO * max(bound, 1.0)
        if exceeds and self.largest_reward > 0 and not self._warned:
            self._warned = True
            warn_user(
                f"the critic diverges: the mean of |Q| is {value:.3g} in units of return_scale, but with "
                f"rewards of at most {self.largest_reward:.3g} and discount={self.discount:g} no value "
                f"exceeds {bound:.3g}; lower the learning rate, the discount or target_rate, or leave "
                f"return_scale=None, which normalizes the rewards"
            )


def warn_of_small_scale(return_scale: float, data_scale: float) -> None:
    """Warn about a scale of returns that is below `SMALL_SCALE` of that of the data.

    Values of the critic are then large numbers, for which its learning rate and its initial weights are too
    small.

    Args:
        return_scale: divisor of rewards and returns.
        data_scale: standard deviation of the returns-to-go of the data.
    """
    if return_scale < SMALL_SCALE * data_scale:
        warn_user(
            f"return_scale={return_scale:g} is less than {SMALL_SCALE:.0%} of {data_scale:.3g}, the standard "
            f"deviation of the returns-to-go in the data: the values of the critic are large, so it learns "
            f"slowly or diverges; leave return_scale=None, which normalizes the rewards"
        )


def largest_reward(windows: CriticWindows) -> Tensor:
    """Return the largest absolute reward that the targets of a batch count, a scalar."""
    last = windows.rewards[:, -1] * windows.terminated
    return torch.cat([windows.rewards[:, :-1], last[:, None]], dim=1).abs().max()
