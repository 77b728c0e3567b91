"""Simulated captures of CUDA graphs: each launch runs a function again, in the memory of its results."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlxf.agents.common.captured_function import WARM_UP

Run = Callable[[], Sequence[Tensor | None]]


def capture_on_cpu(run: Run, device: torch.device) -> Any:
    """Return a function that runs ``run`` again and overwrites its results, and the results, as `capture`."""
    with torch.random.fork_rng([]):
        for _ in range(WARM_UP):
            run()
        results = run()
    return repeated(run, results), results


def repeated(run: Run, results: Sequence[Tensor | None]) -> Callable[[], None]:
    """Return a function that runs ``run`` again and overwrites its results."""

    def replay() -> None:
        for old, new in zip(results, run(), strict=True):
            if old is not None and new is not None:
                old.copy_(new)

    return replay
