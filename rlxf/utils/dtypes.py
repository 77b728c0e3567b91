"""Conversion of dtypes and scalars of NumPy."""

from typing import Any

import numpy as np
import torch


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return the dtype of torch that equals one of NumPy."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def to_builtin(value: Any) -> Any:
    """Return a scalar of NumPy as a built-in number, bool or text; other values as they are."""
    return value.item() if isinstance(value, np.generic) else value
