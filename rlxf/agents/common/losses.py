"""Losses averaged over real steps, and the check of the exit confidence that an action space allows."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention import CALM
from rlxf.attention.depth.base import Depth


def masked_mean(x: Tensor, weight: Tensor) -> Tensor:
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


def check_exit_confidence(depth: Depth, action_space: spaces.Space[Any]) -> None:
    """Raise ValueError if the exit confidence needs discrete actions and the action space is a Box."""
    if isinstance(depth, CALM) and depth.confidence == "softmax" and isinstance(action_space, spaces.Box):
        raise ValueError(
            f"{depth} compares the probabilities of discrete actions, but the action space is "
            f"{action_space}; use confidence='state' or 'classifier'"
        )
