"""Metrics of attention weights, as pure functions of tensors."""

from torch import Tensor


def share_of_memory(weights: Tensor) -> float:
    """Share of all attention on the memory, from 0 to 1.

    Args:
        weights: attention weights (B, H, T, M + T), with the M keys of the memory first.
    """
    memory = weights.shape[-1] - weights.shape[-2]
    return (weights[..., :memory].sum() / weights.sum()).item()


def mean_distance(weights: Tensor, distance: Tensor) -> float:
    """Mean attention distance in steps, ``sum_ij w_ij d_ij / sum_ij w_ij``.

    Args:
        weights: attention weights w, (B, H, T, M + T).
        distance: d, (B, T, M + T), position of the query minus position of the key.
    """
    return ((weights * distance[:, None]).sum() / weights.sum()).item()
