"""Process with the accelerator, which tests share."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from tests.devices import accelerator


def prepare() -> None:
    """Install the device in a new process."""
    torch.set_num_threads(1)
    accelerator.install()


@pytest.fixture(scope="session")
def on_device() -> Iterator[Callable[..., Any]]:
    """Return a function that calls a function of a module in the process, and returns or raises its result.

    torch supports one simulated device in a process, which must exist before the first backward pass.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=prepare) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()
