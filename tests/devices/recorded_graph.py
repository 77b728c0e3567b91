"""Simulation of CUDA graphs on the simulated device: recorded operations are repeated without their program.

As in a CUDA graph, numbers and branches of Python, and tensors on the CPU, stay those of the recorded run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlxf.utils.errors import CompilationError
from tests.devices.virtual_device import VirtualTensor, traffic


class Recorder(TorchDispatchMode):
    """Context that records the operations on tensors of the simulated device."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, list[VirtualTensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if on_device(args, kwargs, results):
            self._operations.append((func, args, kwargs, on_device(results)))
        return results

    @torch.no_grad()
    def replay(self) -> None:
        """Repeat all operations, and write their results to the memory of the recorded ones."""
        for func, args, kwargs, results in self._operations:
            inputs = {memory(x) for x in on_device(args, kwargs)}
            for old, new in zip(results, on_device(func(*args, **kwargs)), strict=True):
                if memory(old) not in inputs and memory(old) != memory(new):  # not a view, not in place
                    old.raw.copy_(new.raw)


def on_device(*values: Any) -> list[VirtualTensor]:
    """Return the tensors of the device in nested values."""
    return [x for x in tree_leaves(values) if isinstance(x, VirtualTensor)]


def memory(x: VirtualTensor) -> int:
    """Return the address of the memory of a tensor."""
    return x.raw.untyped_storage().data_ptr()


def capture(run: Callable[[], Sequence[Tensor | None]], device: torch.device) -> Any:
    """Return a function that repeats the operations of ``run``, and its results, like the capture on a GPU.

    Raises:
        CompilationError: if the run waits for the device or copies from or to the CPU.
    """
    with torch.random.fork_rng([]):
        run()
        with traffic() as counts:
            run()
        if counts.waits or counts.copies:
            reason = f"{counts.waits}, {counts.copies}"
            raise CompilationError(f"an operation cannot be captured as a CUDA graph: {reason}")
        with Recorder() as recorder:
            results = run()
    return recorder.replay, results
