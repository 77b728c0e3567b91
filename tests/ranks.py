"""Helpers for tests with several ranks, which are forked so that modules are imported only once."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from rlxf.training.distributed import init_process_group

TIMEOUT = 60.0
FORK = multiprocessing.get_context("fork")


@contextmanager
def new_store() -> Iterator[dist.TCPStore]:
    """Create a key-value store like that of torchrun, in a process of its own.

    The thread of the store resolves host names under a lock of the C library. A process forked meanwhile
    would inherit the locked lock, so the thread must not run in a process that forks.
    """
    port, process = _started(_keep_store)
    try:
        yield dist.TCPStore("127.0.0.1", _received(port), is_master=False)
    finally:
        process.kill()
        process.join(TIMEOUT)


def on_ranks(
    count: int, work: Callable[..., Any], *args: Any, store: dist.TCPStore | None = None
) -> list[Any]:
    """Run ``work(*args)`` in a process group of ``count`` forked ranks, and return the result of each rank.

    The result of an exception is its text, that of a killed process is None.
    """
    if store is None:
        with new_store() as store:
            return on_ranks(count, work, *args, store=store)
    started = [_started(_run, rank, count, store.port, work, args) for rank in range(count)]
    try:
        return [_received(receive) for receive, _ in started]
    finally:
        for _, process in started:
            process.join(TIMEOUT)


def _started(run: Callable[..., None], *args: Any) -> tuple[Any, Any]:
    """Start a process; return the connection for its result, and the process."""
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run, args=(send, *args), daemon=True)
    process.start()
    send.close()
    return receive, process


def _received(receive: Any) -> Any:
    assert receive.poll(TIMEOUT), "a process does not respond"
    try:
        return receive.recv()
    except EOFError:
        return None


def _keep_store(send: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    send.send(store.port)
    signal.pause()


def _run(send: Any, rank: int, count: int, port: int, work: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)  # a fork does not copy threads
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # use the existing store
    try:
        init_process_group()
        result = work(*args)
    except BaseException as error:
        result = f"{type(error).__name__}: {error}"
    send.send(result)
