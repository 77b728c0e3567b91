"""Description of the machine, clocks of its devices, and process pools for benchmarks."""

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Return the number of cores and threads, the version of torch, the system load and the GPU's name."""
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load": os.getloadavg(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def is_cuda(device: torch.device | str) -> bool:
    """Return whether a device is a GPU, whose work runs after the calls that start it have returned."""
    return torch.device(device).type == "cuda"


def step_options(device: torch.device | str, compiled: bool) -> dict[str, bool]:
    """Return the argument of GTrXLPPO that compiles steps on the CPU, or captures them on a GPU."""
    return {"cuda_graphs" if is_cuda(device) else "compile": compiled}


def now(device: torch.device | str = "cpu", cpu_clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the time in seconds after all work of a device.

    Args:
        device: device; for a GPU, the program waits for its work, and the time is elapsed time.
        cpu_clock: clock of all other devices; ``time.process_time`` measures CPU time.
    """
    if not is_cuda(device):
        return cpu_clock()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def fresh_processes(number: int, threads: int = 1) -> ProcessPoolExecutor:
    """Return a pool with this number of torch threads in each process, and a new process for each task.

    A new process makes the peak memory of a task independent of the tasks before it.
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(number, context, torch.set_num_threads, (threads,), max_tasks_per_child=1)
