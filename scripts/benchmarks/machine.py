"""Where a benchmark ran, and the processes that it ran in."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """What ran the benchmark, and how busy it was."""
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load": os.getloadavg(),
    }


def fresh_processes(number: int, threads: int = 1) -> ProcessPoolExecutor:
    """So many processes, each with a Python of its own and so many threads of torch."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(number, context, torch.set_num_threads, (threads,))
