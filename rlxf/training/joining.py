"""Which of the processes of a training this one is: it has joined the others, or is alone."""

import os

from rlxf.training.ranks import Ranks

_joined: list[Ranks] = [Ranks()]


def here() -> Ranks:
    """The processes that this one has joined; itself alone, unless `join` was called under torchrun.

    A process is one of them or it is not: so this is asked for, and not passed around.
    """
    return _joined[-1]


def join() -> Ranks:
    """Meet the other processes that torchrun has started; alone if it has started none.

    Call it before an agent is made: agents take the ranks that are `here` then. Afterwards ``n_envs``,
    ``batch_size`` and steps are those of all processes together, as in one process.

    Raises:
        ValueError: if there are more processes than GPUs on a machine that has some.
        ConnectionError: if the others do not come.
    """
    if here().count == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from rlxf.training.rank_group import RankGroup  # only where it is needed

        _joined.append(RankGroup.join())
    return here()
