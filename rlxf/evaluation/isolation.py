"""Evaluation that leaves the random generators of a training alone."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the global generators of Python, numpy and torch (CPU and GPUs) back to where they were.

    What is drawn meanwhile, e.g. by an environment or by a policy that samples, is not missing afterwards.
    """
    python, twister = random.getstate(), np.random.get_state()  # noqa: NPY002  # environments draw from it
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(twister)  # noqa: NPY002
