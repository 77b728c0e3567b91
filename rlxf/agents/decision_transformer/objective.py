"""The mathematics of learning from trajectories: pure functions of tensors."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST = 1 - 1e-6
"""Of a squashed action: at 1 itself, its inverse is infinite."""


def normal_log_prob(mean: Tensor, log_std: Tensor, x: Tensor) -> Tensor:
    """``log N(x; mean, std)`` of each number."""
    return -0.5 * ((x - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)


def log_slope(u: Tensor) -> Tensor:
    """``log tanh'(u) = log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u))``, also where tanh is 1."""
    return 2 * (math.log(2) - u - F.softplus(-2 * u))


def unsquashed(action: Tensor) -> Tensor:
    """``atanh``; what is farther out than 1 - 1e-6 counts as that."""
    return action.clamp(-LARGEST, LARGEST).atanh()


def entropies(logits: tuple[Tensor, ...]) -> Tensor:
    """``-sum_i sum_c p_i(c) log p_i(c)``: n tensors (..., N_i) -> (...)."""
    logs = [x.log_softmax(dim=-1) for x in logits]
    return torch.stack([-(log.exp() * log).sum(dim=-1) for log in logs]).sum(0)


def warm_up(update: int, updates: int) -> float:
    """``min(1, (update + 1) / updates)``: the share of the learning rate at an update, counted from 0."""
    return min(1.0, (update + 1) / max(1, updates))
