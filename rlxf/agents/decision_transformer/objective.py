"""Pure tensor functions of the Decision Transformer objectives and the warm-up schedule."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST = 1 - 1e-6
"""Largest absolute value of a squashed action before atanh, which is infinite at 1."""


def normal_log_prob(mean: Tensor, log_std: Tensor, x: Tensor) -> Tensor:
    """Compute ``log N(x; mean, std)`` elementwise."""
    return -0.5 * ((x - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)


def log_slope(u: Tensor) -> Tensor:
    """Compute ``log tanh'(u) = log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u))``, stable for large u."""
    return 2 * (math.log(2) - u - F.softplus(-2 * u))


def unsquashed(action: Tensor) -> Tensor:
    """Compute ``atanh`` of actions clamped to [-(1 - 1e-6), 1 - 1e-6]."""
    return action.clamp(-LARGEST, LARGEST).atanh()


def entropies(logits: tuple[Tensor, ...]) -> Tensor:
    """Compute ``-sum_i sum_c p_i(c) log p_i(c)``: n tensors of logits (..., N_i) -> (...)."""
    logs = [x.log_softmax(dim=-1) for x in logits]
    return torch.stack([-(log.exp() * log).sum(dim=-1) for log in logs]).sum(0)


def warm_up(update: int, updates: int) -> float:
    """Compute the learning-rate factor ``min(1, (update + 1) / updates)``; ``update`` counts from 0."""
    return min(1.0, (update + 1) / max(1, updates))
