"""A part of torchrun's store in which nobody has written yet."""

import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

PAUSE = 0.01
"""Seconds from one look of rank 0 into the store to the next."""


def fresh_part(store: dist.Store, rank: int, count: int, patience: timedelta) -> dist.Store:
    """A part of the store that is new, and the same for all processes that were started together.

    torchrun has one store for as long as it lives. Processes that it starts anew find there what those before
    them wrote: the addresses of the dead. How often they were started names no part, as each machine counts
    by itself, does not count when others come or leave, and begins at 0 when it comes. So rank 0 makes up a
    name. Each of the others asks for it with a question that nobody asked before, so that what was answered
    to the dead is nobody's answer, and says that it has heard it.

    Args:
        store: of torchrun.
        rank: the number of this process, from 0.
        count: how many are started together.
        patience: how long rank 0 waits for the others; they wait as long as the store does.

    Raises:
        ConnectionError: if rank 0 waits in vain.
        DistStoreError: if another one does, or the store is gone.
    """
    name = _told(store, rank) if rank else _tell(store, set(range(1, count)), patience)
    return dist.PrefixStore(name, store)


def _told(store: dist.Store, rank: int) -> str:
    """The name that rank 0 answers with."""
    own = uuid4().hex
    store.set(_question(rank), own)
    name = store.get(_answer(own)).decode()
    store.set(_heard(name, rank), "")
    return str(name)


def _tell(store: dist.Store, waiting: set[int], patience: timedelta) -> str:
    """A new name, once all others have heard it; an answer may go to the dead, until the living asks."""
    name, end = uuid4().hex, time.monotonic() + patience.total_seconds()
    while waiting:
        if time.monotonic() > end:
            raise ConnectionError(f"of the other processes, those of rank {sorted(waiting)} did not come")
        for rank in waiting:
            _reply(store, rank, name)
        waiting = {rank for rank in waiting if not store.check([_heard(name, rank)])}
        time.sleep(PAUSE)
    return name


def _reply(store: dist.Store, rank: int, name: str) -> None:
    if store.check([_question(rank)]):
        store.set(_answer(store.get(_question(rank)).decode()), name)


def _question(rank: int) -> str:
    return f"rlxf/question of {rank}"


def _answer(question: str) -> str:
    return f"rlxf/answer to {question}"


def _heard(name: str, rank: int) -> str:
    return f"rlxf/{name} heard by {rank}"
