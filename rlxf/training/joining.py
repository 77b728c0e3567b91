"""Process group of distributed training: initialization and access to the current group."""

import os

from rlxf.training.ranks import Ranks

_joined: list[Ranks] = [Ranks()]


def here() -> Ranks:
    """Return the current process group: a single process, unless `join` was called under torchrun.

    Like torch's default process group, it is a global of the process and is not passed as an argument.
    """
    return _joined[-1]


def join() -> Ranks:
    """Initialize the process group from torchrun's environment variables; without torchrun, do nothing.

    Call this function before you construct an agent: the agent uses the group that `here` returns at that
    moment. Afterwards ``n_envs``, ``batch_size`` and numbers of steps are totals over all processes.

    Returns:
        The current process group.

    Raises:
        ValueError: if a machine has GPUs, but fewer than processes.
        ConnectionError: if another process does not connect.
    """
    if here().count == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from rlxf.training.rank_group import RankGroup  # torch.distributed is imported only if needed

        _joined.append(RankGroup.join())
    return here()
