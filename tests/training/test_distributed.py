"""Tests of process groups: collectives, gradients, generators and failures of processes."""

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rlxf.agents.common.losses import masked_mean
from rlxf.training import Archive
from rlxf.training.distributed import (
    TIMEOUT,
    _connection_errors,
    init_process_group,
    process_group,
    rendezvous_store,
)
from tests.ranks import new_store, on_ranks

ROWS = 4


def test_join_without_torchrun_gives_a_single_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert init_process_group() is process_group()
    assert (process_group().rank, process_group().world_size, process_group().is_main) == (0, 1, True)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert init_process_group().world_size == 1


def test_part_rejects_totals_that_are_not_divisible():
    def work():
        return process_group().split_total("n_envs", 6), process_group().split_total("n_envs", 7)

    for error in on_ranks(2, work):
        assert error.startswith("ValueError: n_envs is 7 in total, which is not divisible by the 2 processes")


def numbers(rank=None):
    """Return inputs and weights of all rows, or of the rows of one rank; the last weights are 0."""
    x = torch.randn(2 * ROWS, 3, generator=torch.Generator().manual_seed(1))
    weight = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0])
    rows = slice(None) if rank is None else slice(rank * ROWS, (rank + 1) * ROWS)
    return x[rows], weight[rows]


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    net.append(nn.ParameterDict({"unused": nn.Parameter(torch.ones(2))}))
    return net


def backward(net, x, weight):
    y = net[2](net[1](net[0](x)))[:, 0]
    parts = {"loss": masked_mean(y.square(), weight), "mean": masked_mean(y, weight)}
    pooled = process_group().reduce_means(parts, weight.sum())
    pooled["loss"].backward()
    process_group().all_reduce_gradients(net.parameters())
    gradients = [None if p.grad is None else p.grad.numpy() for p in net.parameters()]
    return gradients, {name: part.item() for name, part in pooled.items()}


def test_gradients_and_means_equal_those_of_one_process():
    expected, parts = backward(network(), *numbers())
    for gradients, means in on_ranks(2, lambda: backward(network(), *numbers(process_group().rank))):
        for one, other in zip(gradients, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
        assert means == pytest.approx(parts, abs=1e-6)


def test_gradient_of_a_single_rank_reaches_all_ranks():
    def work():
        net = network()
        if process_group().rank == 1:
            (2 * net[3]["unused"]).sum().backward()
        process_group().all_reduce_gradients(net.parameters())
        return net[3]["unused"].grad.tolist(), net[0].weight.grad

    assert on_ranks(2, work) == [([2.0, 2.0], None)] * 2


def test_nan_of_one_rank_reaches_all_ranks():
    def work():
        parts = {"loss": torch.tensor([1.0, float("nan")][process_group().rank], requires_grad=True)}
        return bool(process_group().reduce_means(parts, torch.tensor(1.0))["loss"].isnan())

    assert on_ranks(2, work) == [True, True]


def test_rows_and_indices_of_ranks():
    def work():
        own = torch.arange(3.0)[:, None] + 10 * process_group().rank
        every = process_group().all_gather(own)
        alone = process_group().embed_rows(own)
        same = torch.equal(process_group().local_rows(alone), own) and torch.equal(
            process_group().local_rows(every), own
        )
        chosen = process_group().local_indices(torch.tensor([4, 0, 2, 5]), 3)
        return (
            every[:, 0].tolist(),
            same,
            chosen.tolist(),
            process_group().all_gather(own[:2, 0] > 0).tolist(),
        )

    every = [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]
    bits = [False, True, True, True]
    assert on_ranks(2, work) == [(every, True, [0, 2], bits), (every, True, [1, 2], bits)]


def test_gathered_archives_may_have_different_sizes():
    def work():
        rank = process_group().rank
        own = Archive({"name": "x" * rank}, {"group": {"t": torch.full((rank + 1,), rank)}, "other": {}})
        return [(a.documents, a.tensors["group"]["t"].tolist()) for a in process_group().gather_archives(own)]

    assert on_ranks(2, work) == [[({"name": ""}, [0]), ({"name": "x"}, [1, 1])]] * 2


def test_agree_broadcasts_weights_and_generators_and_own_draws_differ():
    def work():
        torch.manual_seed(process_group().rank)
        net, order = nn.Linear(2, 2), torch.Generator().manual_seed(process_group().rank)
        process_group().broadcast_module(net, order)
        process_group().broadcast_rng_state()
        with process_group().rank_rng(order):
            own = torch.rand(()).item()
        return net.weight.tolist(), torch.rand((), generator=order).item(), torch.rand(()).item(), own

    (*one, own), (*other, others) = on_ranks(2, work)
    assert one == other
    assert own != others


def test_check_same_reports_different_numbers():
    for error in on_ranks(
        2, lambda: process_group().check_equal_on_ranks({"n_envs": 2, "steps": process_group().rank})
    ):
        assert error == "ValueError: steps must be the same in all processes, got [0, 1] by rank"


def killed():
    process_group().barrier()
    if process_group().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    process_group().barrier()


@pytest.mark.faults
def test_killed_process_is_detected_at_once():
    one, other = on_ranks(2, killed)
    assert one.startswith("ConnectionError: another of the 2 processes ended or did not respond")
    assert other is None


@pytest.mark.thorough
@pytest.mark.faults
def test_restarted_processes_connect_through_the_old_store():
    """The number of processes differs each time, and torchrun's restart count does not change."""
    with new_store() as store:
        for count in (2, 3, 2):
            assert on_ranks(count, killed, store=store)[1] is None
            assert (
                on_ranks(count, lambda: process_group().all_reduce_max(process_group().rank), store=store)
                == [count - 1] * count
            )


@pytest.mark.faults
def test_request_of_a_dead_process_does_not_block_the_rendezvous():
    with new_store() as store:
        impatient = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        impatient.set_timeout(timedelta(milliseconds=50))
        with pytest.raises(dist.DistStoreError):
            rendezvous_store(impatient, 1, 2, TIMEOUT)  # rank 0 died before it answered
        with pytest.raises(ConnectionError, match=r"of rank \[1, 2\] did not connect"):
            rendezvous_store(store, 0, 3, timedelta(milliseconds=50))
        assert (
            on_ranks(3, lambda: process_group().all_reduce_max(process_group().rank), store=store) == [2] * 3
        )


GLOO_ERROR = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms"
OTHER_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    RuntimeError("ProcessGroupGloo::allgather: invalid output tensor list at index 0"),
]


@pytest.mark.parametrize(
    "error", [RuntimeError(GLOO_ERROR), dist.DistNetworkError("reset by peer")], ids=["gloo", "store"]
)
def test_connection_errors_of_torch_become_connection_error(error):
    with (
        pytest.raises(ConnectionError, match="another of the 2 processes ended or did not respond"),
        _connection_errors(2),
    ):
        raise error


@pytest.mark.parametrize("error", OTHER_ERRORS, ids=["memory", "shape", "call"])
def test_other_errors_propagate_unchanged(error):
    with pytest.raises(RuntimeError) as raised, _connection_errors(2):
        raise error
    assert raised.value is error


def test_single_process_does_not_initialize_torch_distributed(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert init_process_group().world_size == 1
    assert not dist.is_initialized()


def test_missing_variables_of_torchrun_are_named(monkeypatch):
    """Schedulers of clusters set some of them without torchrun."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ValueError, match="WORLD_SIZE is 2, but LOCAL_RANK is not set"):
        init_process_group()
    assert not dist.is_initialized()


LEAVE = """
import os, socket, torch
import torch.distributed as dist
from rlxf.training.distributed import TorchProcessGroup

with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
TorchProcessGroup.join().all_reduce_max(1)
import torch._dynamo  # as many modules of torch and Stable-Baselines3 do
dist.destroy_process_group()
names = [open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")]
print([name for name in names if "gloo" in name])
"""


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_no_thread_of_the_process_group_lives_until_shutdown():
    result = subprocess.run(
        [sys.executable, "-c", LEAVE],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.stdout.splitlines()[-1] == "[]"
