"""Where a benchmark ran."""

import os
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
