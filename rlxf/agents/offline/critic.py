"""Critic of offline agents: twin action values, their target networks, and n-step targets in windows."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

from rlxf.agents.common.actions import BoxActions, DiscreteActions

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


def window_targets(rewards: Tensor, last_value: Tensor, terminated: Tensor, discount: float) -> Tensor:
    r"""Compute ``sum_(j=i)^(n-1) g^(j-i) r_j + g^(n-i) V_n`` at each step i of a window that ends at step n.

    If the episode terminates after step n, the target is ``sum_(j=i)^n g^(j-i) r_j`` instead.

    Source: Hu et al. 2024, arXiv:2405.17098, section 4.2.

    Args:
        rewards: (B, K).
        last_value: V_n, (B,).
        terminated: (B,) bool.
        discount: g.
    """
    steps = torch.arange(rewards.shape[1], device=rewards.device)
    distance = steps[None, :] - steps[:, None]
    weights = rewards.new_tensor(discount) ** distance.clamp(min=0) * (distance >= 0)
    last = torch.where(terminated, rewards[:, -1], last_value)
    return torch.cat([rewards[:, :-1], last[:, None]], dim=1) @ weights.T
