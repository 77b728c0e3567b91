"""Tests that need several processes: forked from the test, so that nothing is imported twice."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from rlxf.training.joining import join

LONGEST = 60.0
FORK = multiprocessing.get_context("fork")


@contextmanager
def new_store() -> Iterator[dist.TCPStore]:
    """As torchrun has one, in a process of its own.

    Its thread looks up names, under a lock of the C library. A process that is forked meanwhile inherits the
    lock, and nobody who would open it; so this thread must not be one of a process that forks.
    """
    port, process = _started(_keep_store)
    try:
        yield dist.TCPStore("127.0.0.1", _received(port), is_master=False)
    finally:
        process.kill()
        process.join(LONGEST)


def on_ranks(
    count: int, work: Callable[..., Any], *args: Any, store: dist.TCPStore | None = None
) -> list[Any]:
    """What ``work(*args)`` gives in each of so many processes that have joined, by a new store or this one.

    An exception comes as its text; None is of a process that died.
    """
    if store is None:
        with new_store() as store:
            return on_ranks(count, work, *args, store=store)
    started = [_started(_run, rank, count, store.port, work, args) for rank in range(count)]
    try:
        return [_received(receive) for receive, _ in started]
    finally:
        for _, process in started:
            process.join(LONGEST)


def _started(run: Callable[..., None], *args: Any) -> tuple[Any, Any]:
    """Where a new process answers, and it."""
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run, args=(send, *args), daemon=True)
    process.start()
    send.close()
    return receive, process


def _received(receive: Any) -> Any:
    assert receive.poll(LONGEST), "a process does not answer"
    try:
        return receive.recv()
    except EOFError:
        return None


def _keep_store(send: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    send.send(store.port)
    signal.pause()


def _run(send: Any, rank: int, count: int, port: int, work: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)  # threads of the parent are not here
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there already
    try:
        join()
        found = work(*args)
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"
    send.send(found)
