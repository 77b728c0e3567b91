"""Decisions that depend on values of tensors, which are unknown while torch.export traces a step."""

import torch
from torch import Tensor


def is_tracing() -> bool:
    """Return whether torch.export traces this code, so that values of tensors are unknown."""
    return torch.compiler.is_exporting()


def may_contain_true(mask: Tensor) -> bool:
    """Return whether a bool tensor contains True; while tracing, return True.

    Code uses it to skip work that would change nothing. An exported step always does this work.
    """
    return is_tracing() or bool(mask.any())


def selected_rows(mask: Tensor) -> Tensor:
    """Return the rows (N,) int64 where a mask (B,) is True; while tracing, all rows.

    The caller must let rows where the mask is False change nothing, e.g. by writing to an unused slot.
    """
    if is_tracing():
        return torch.arange(len(mask), device=mask.device)
    return mask.nonzero()[:, 0]
