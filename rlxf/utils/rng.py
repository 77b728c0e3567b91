"""State of the global random number generators."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Context manager that restores the global generators of Python, NumPy and torch (CPU and GPUs).

    Random numbers that an environment or a policy draws inside do not affect later draws.
    """
    python, twister = random.getstate(), np.random.get_state()  # noqa: NPY002  # environments draw from it
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(twister)  # noqa: NPY002
