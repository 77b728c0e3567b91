"""Tests that need several processes: forked from the test, so that nothing is imported twice."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rlxf.training.joining import join

LONGEST = 60.0
AWAKE, FORKS = 20.0, 3


def new_store() -> dist.TCPStore:
    """As torchrun has one, for as long as it lives."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def on_ranks(
    count: int, work: Callable[..., Any], *args: Any, store: dist.TCPStore | None = None
) -> list[Any]:
    """What ``work(*args)`` gives in each of so many processes that have joined, by a new store or this one.

    An exception comes as its text; None is of a process that died.
    """
    store = store or new_store()
    started = [_started(rank, count, store.port, work, args) for rank in range(count)]
    try:
        return [_received(receive) for _, receive in started]
    finally:
        for process, _ in started:
            process.join(LONGEST)


def _started(rank: int, count: int, port: int, work: Callable[..., Any], args: Any) -> tuple[Any, Any]:
    """A process, and where it answers. A fork of one with many threads may not wake: then another one."""
    fork = multiprocessing.get_context("fork")
    for _ in range(FORKS):
        receive, send = fork.Pipe(duplex=False)
        process = fork.Process(target=_run, args=(rank, count, port, send, work, args), daemon=True)
        process.start()
        send.close()
        if receive.poll(AWAKE):
            assert receive.recv() == rank
            return process, receive
        process.kill()
    raise AssertionError(f"{FORKS} forks did not wake")


def _received(receive: Any) -> Any:
    assert receive.poll(LONGEST), "a process does not answer"
    try:
        return receive.recv()
    except EOFError:
        return None


def _run(rank: int, count: int, port: int, send: Any, work: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)  # threads of the parent are not here
    send.send(rank)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is the parent's
    try:
        join()
        found = work(*args)
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"
    send.send(found)
