"""What attention weights say of the use of memory: pure functions of tensors."""

from torch import Tensor


def share_of_memory(weights: Tensor) -> float:
    """Share of all attention that falls on memory, from 0 to 1.

    Args:
        weights: (B, H, T, M + T), the memory's M keys first.
    """
    memory = weights.shape[-1] - weights.shape[-2]
    return (weights[..., :memory].sum() / weights.sum()).item()


def mean_distance(weights: Tensor, distance: Tensor) -> float:
    """``sum_ij w_ij d_ij / sum_ij w_ij``: how far back attention goes, in steps.

    Args:
        weights: w, (B, H, T, M + T).
        distance: d, (B, T, M + T), position of the query minus position of the key.
    """
    return ((weights * distance[:, None]).sum() / weights.sum()).item()
