"""Prediction losses, as pure functions of tensors."""

import torch
from torch import Tensor
from torch.nn import functional as F


def average(x: Tensor, weight: Tensor) -> Tensor:
    """Mean of x over the entries of weight 1; both have the same shape."""
    return (x * weight).sum() / weight.sum().clamp(min=1)


def squared_error(predicted: Tensor, wanted: Tensor) -> Tensor:
    """``|| predicted - wanted ||^2 / D``: (..., D) -> (...)."""
    return (predicted - wanted).square().mean(dim=-1)


def cross_entropies(logits: tuple[Tensor, ...], choices: Tensor) -> Tensor:
    """``-sum_i log p_i(choice_i)``: n tensors (..., N_i) and int64 (..., n) -> (...)."""
    parts = zip(logits, choices.unbind(-1), strict=True)
    return (
        torch.stack([F.cross_entropy(x.flatten(0, -2), c.flatten(), reduction="none") for x, c in parts])
        .sum(0)
        .view(choices.shape[:-1])
    )
