"""Data-parallel training under torchrun: the current process group and its initialization."""

import os

from rlxf.training.distributed.group import ProcessGroup

_joined: list[ProcessGroup] = [ProcessGroup()]


def process_group() -> ProcessGroup:
    """Return the current process group: a single process, unless `init_process_group` was called under
    torchrun.

    Like torch's default process group, it is a global of the process and is not passed as an argument.
    """
    return _joined[-1]


def init_process_group() -> ProcessGroup:
    """Initialize the process group from torchrun's environment variables; without torchrun, do nothing.

    Call this function before you construct an agent: the agent uses the group that `process_group` returns
    at that moment. Afterwards ``n_envs``, ``batch_size`` and numbers of steps are totals over all processes.

    Returns:
        The current process group.

    Raises:
        ValueError: if a machine has GPUs, but fewer than processes.
        ConnectionError: if another process does not connect.
    """
    if process_group().world_size == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from rlxf.training.distributed.rank_group import (
            TorchProcessGroup,  # torch.distributed is imported only if needed
        )

        _joined.append(TorchProcessGroup.join())
    return process_group()
