"""Functions of tensors on a GPU, captured as CUDA graphs."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

from rlxf.agents.common.compiled_function import CompilationError, trace

GRAPH_DEVICES = ("cuda",)
"""Types of devices whose kernels can be captured."""
Results = TypeVar("Results", bound=Sequence[Tensor | None])
WARM_UP = 3
"""Runs before the capture, in which libraries choose their kernels and allocate their workspaces."""


class CapturedFunction:
    """Function of tensors of fixed shapes on a GPU, whose kernels are launched by one call.

    A small network takes longer to launch its kernels than to compute them. A CUDA graph repeats the kernels
    of one run, which read and write the same memory in each run. So the arguments are copied to the memory of
    the captured run, and its results and the arguments that it changed in place are copied from there.

    The kernels read the parameters and buffers of the module, so updates in place need no notification. If
    some were replaced, which their addresses tell, the function is captured again.

    Args:
        module: the function, in evaluation mode. Its decisions may depend on shapes, but not on values.
        examples: arguments, which must be tensors on the GPU.

    Raises:
        CompilationError: if the function cannot be traced, or one of its operations cannot be captured, for
            example because it waits for the GPU.
    """

    def __init__(self, module: nn.Module, examples: Sequence[Tensor]):
        self._module = module
        self._capture(examples)

    @torch.no_grad()
    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        """Return the results of the function for tensors with the shapes of the examples."""
        if self._addresses != self._present_addresses():
            self._capture(arguments)
        copy_together(self._arguments, arguments)
        self._replay()
        copy_together([arguments[n] for n in self._changed], [self._arguments[n] for n in self._changed])
        return [x.clone() for x in self._results]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _capture(self, examples: Sequence[Tensor]) -> None:
        """Trace the function, which decides its branches, and capture it with copies of the arguments."""
        self._addresses = self._present_addresses()
        self._arguments = [x.clone() for x in examples]
        program: Callable[..., Sequence[Tensor]] = trace(self._module, self._arguments).module()
        versions = [x._version for x in self._arguments]
        self._replay, self._results = capture(lambda: program(*self._arguments))
        self._changed = [n for n, x in enumerate(self._arguments) if x._version != versions[n]]

    def _present_addresses(self) -> list[int]:
        return [x.data_ptr() for x in chain(self._module.parameters(), self._module.buffers())]


def supports_graphs(device: torch.device) -> bool:
    """Return whether the kernels of a device can be captured."""
    return device.type in GRAPH_DEVICES


def copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to others with the same shapes and dtypes, those of each dtype by one call."""
    for dtype in {x.dtype for x in targets}:
        chosen = [n for n, x in enumerate(targets) if x.dtype is dtype]
        torch._foreach_copy_([targets[n] for n in chosen], [sources[n] for n in chosen])


def capture(run: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
    """Capture the kernels of a function as a CUDA graph.

    Args:
        run: the function.

    Returns:
        A function that launches the kernels again, and the results, which each launch overwrites.

    Raises:
        CompilationError: if an operation cannot be captured; the message is the reason.
    """
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    try:
        with torch.cuda.graph(graph):
            results = run()
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise CompilationError(f"an operation cannot be captured as a CUDA graph: {reason}") from error
    return graph.replay, results
