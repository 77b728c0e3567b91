"""Functions of tensors on a GPU, captured as CUDA graphs."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from rlxf.agents.common.compiled_function import ModuleTensors, trace
from rlxf.utils.errors import CompilationError

GRAPH_DEVICES = ("cuda",)
"""Types of devices whose kernels can be captured."""
WARM_UP = 3
"""Runs before the capture, in which libraries choose their kernels and allocate their workspaces."""
Results = TypeVar("Results", bound=Sequence[Tensor | None])


class CapturedFunction:
    """Function of tensors of fixed shapes on a GPU, whose kernels are launched by one call.

    A small network takes longer to launch its kernels than to compute them. A CUDA graph repeats the kernels
    of one run, which read and write the same memory in each run. So the arguments are copied to the memory of
    the captured run, and its results and the arguments that it changed in place are copied from there.

    The kernels read the parameters and buffers of the module, so updates in place need no notification. If
    some were replaced, detected by their memory addresses, the function is captured again.

    Args:
        module: the function, in evaluation mode. Its decisions may depend on shapes, but not on values.
        examples: arguments, which must be tensors on the GPU.

    Raises:
        CompilationError: if the function cannot be traced, or one of its operations cannot be captured, for
            example because it waits for the GPU.
    """

    def __init__(self, module: nn.Module, examples: Sequence[Tensor]):
        self._state = ModuleTensors(module)
        self._module = module
        self._capture(examples)

    @torch.no_grad()
    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        """Return the results of the function for tensors with the shapes of the examples."""
        if self._addresses != self._state.addresses():
            self._capture(arguments)
        foreach_copy(self._arguments, arguments)
        self._replay()
        foreach_copy([arguments[n] for n in self._changed], [self._arguments[n] for n in self._changed])
        return [x.clone() for x in self._results]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _capture(self, examples: Sequence[Tensor]) -> None:
        """Trace the function, which decides its branches, and capture it with copies of the arguments."""
        self._addresses = self._state.addresses()
        self._arguments = [x.clone() for x in examples]
        self._program: Callable[..., Sequence[Tensor]] = trace(self._module, self._arguments).module()
        versions = [x._version for x in self._arguments]
        device = self._arguments[0].device
        self._replay, self._results = capture(lambda: self._program(*self._arguments), device)
        self._changed = [n for n, x in enumerate(self._arguments) if x._version != versions[n]]


def supports_graphs(device: torch.device) -> bool:
    """Return whether the kernels of a device can be captured."""
    return device.type in GRAPH_DEVICES


def foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to others with the same shapes and dtypes, those of each dtype by one call."""
    for dtype in {x.dtype for x in targets}:
        chosen = [n for n, x in enumerate(targets) if x.dtype is dtype]
        torch._foreach_copy_([targets[n] for n in chosen], [sources[n] for n in chosen])


def capture(run: Callable[[], Results], device: torch.device) -> tuple[Callable[[], None], Results]:
    """Capture the kernels of a function as a CUDA graph.

    The function is also run before, with random numbers that are drawn again later.

    Args:
        run: the function.
        device: its device.

    Returns:
        A function that launches the kernels again, and the results, which each launch overwrites.

    Raises:
        CompilationError: if an operation cannot be captured; the message is the reason.
    """
    with torch.cuda.device(device), _capture_errors():
        side = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.random.fork_rng([torch.cuda.current_device()]):
            for _ in range(WARM_UP - 1):
                run()
            with _waits_are_errors():
                run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            results = run()
    return graph.replay, results


@contextmanager
def _capture_errors() -> Iterator[None]:
    """Raise CompilationError for errors of torch, and return to the stream before a failed capture."""
    stream = torch.cuda.current_stream()
    try:
        yield
    except RuntimeError as error:
        torch.cuda.set_stream(stream)
        cause = error.__context__ or error  # the end of a failed capture raises another error
        reason = str(cause).strip().partition("\n")[0]
        raise CompilationError(f"an operation cannot be captured as a CUDA graph: {reason}") from error


@contextmanager
def _waits_are_errors() -> Iterator[None]:
    """Raise RuntimeError for operations that wait for the GPU, in place of a failed capture."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
