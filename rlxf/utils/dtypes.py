"""Dtypes of torch that equal those of NumPy."""

from typing import Any

import numpy as np
import torch


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return the dtype of torch that equals one of NumPy."""
    return torch.from_numpy(np.empty(0, dtype)).dtype
