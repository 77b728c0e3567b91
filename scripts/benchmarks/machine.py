"""Description of the machine, and process pools for benchmarks."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Return the number of cores and threads, the version of torch and the system load."""
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load": os.getloadavg(),
    }


def fresh_processes(number: int, threads: int = 1) -> ProcessPoolExecutor:
    """Return a pool with this number of torch threads in each process, and a new process for each task.

    A new process makes the peak memory of a task independent of the tasks before it.
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(number, context, torch.set_num_threads, (threads,), max_tasks_per_child=1)
