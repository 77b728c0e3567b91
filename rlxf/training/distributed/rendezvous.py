"""Rendezvous of the ranks in an unused prefix of torchrun's key-value store."""

import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

PAUSE = 0.01
"""Polling interval of rank 0, in seconds."""


def unused_prefix(store: dist.Store, rank: int, count: int, patience: timedelta) -> dist.Store:
    """Return an unused prefix of the store, the same for all processes that were started together.

    torchrun keeps one store during its lifetime. Restarted processes find the entries of their predecessors
    there, such as addresses of dead processes. The restart count is not a unique prefix: each machine counts
    its own restarts, does not count changes of membership, and starts at 0 when it joins. Rank 0 therefore
    generates a UUID as prefix. Each other rank requests the prefix under a fresh UUID of its own, so replies
    to earlier, dead processes cannot be mistaken for its own, and acknowledges the reply.

    Args:
        store: store of torchrun.
        rank: rank of this process.
        count: number of processes (world size).
        patience: timeout of rank 0; other ranks use the timeout of the store.

    Raises:
        ConnectionError: if rank 0 reaches its timeout.
        DistStoreError: if another rank reaches the timeout, or the store is closed.
    """
    prefix = _request_prefix(store, rank) if rank else _publish_prefix(store, set(range(1, count)), patience)
    return dist.PrefixStore(prefix, store)


def _request_prefix(store: dist.Store, rank: int) -> str:
    """Request the prefix from rank 0, wait for the reply and acknowledge it."""
    request = uuid4().hex
    store.set(_request_key(rank), request)
    prefix = store.get(_reply_key(request)).decode()
    store.set(_acknowledgement_key(prefix, rank), "")
    return str(prefix)


def _publish_prefix(store: dist.Store, waiting: set[int], patience: timedelta) -> str:
    """Generate a prefix and reply to requests until all other ranks have acknowledged it.

    The request of a rank may be that of a dead process until the new process overwrites it. Replies are
    therefore repeated until the acknowledgement.
    """
    prefix, end = uuid4().hex, time.monotonic() + patience.total_seconds()
    while waiting:
        if time.monotonic() > end:
            raise ConnectionError(
                f"the processes of rank {sorted(waiting)} did not connect within {patience}"
            )
        for rank in waiting:
            _reply(store, rank, prefix)
        waiting = {rank for rank in waiting if not store.check([_acknowledgement_key(prefix, rank)])}
        time.sleep(PAUSE)
    return prefix


def _reply(store: dist.Store, rank: int, prefix: str) -> None:
    if store.check([_request_key(rank)]):
        store.set(_reply_key(store.get(_request_key(rank)).decode()), prefix)


def _request_key(rank: int) -> str:
    return f"rlxf/request of {rank}"


def _reply_key(request: str) -> str:
    return f"rlxf/reply to {request}"


def _acknowledgement_key(prefix: str, rank: int) -> str:
    return f"rlxf/{prefix} acknowledged by {rank}"
