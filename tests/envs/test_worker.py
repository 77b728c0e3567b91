"""Worker processes: they end with all their child processes, and ignore the signals of a job."""

import math
import multiprocessing
import os
import re
import signal
import sys
from contextlib import closing
from functools import partial
from multiprocessing.forkserver import _forkserver
from pathlib import Path

import numpy as np
import pytest

from rlxf.envs import BrokenEnvironmentError, Workers, WorkerVecEnv, worker_pool
from rlxf.envs.infos import LOST
from rlxf.envs.worker import Worker
from tests.envs.faulty_envs import (
    IMPATIENT,
    Breaking,
    Clinging,
    Driven,
    Marking,
    Parental,
    breaking,
    is_gone,
    made,
    played,
    until_back,
    wait_until,
)

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore:environment:RuntimeWarning")]
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
JOB = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that a scheduler sends to all processes of a job."""


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"number": 0}, ValueError, "workers must be at least 1, got 0"),
        ({"number": 1.5}, TypeError, "workers must be a whole number, got 1.5"),
        ({"max_restarts": 1.5}, TypeError, "max_restarts must be a whole number, got 1.5"),
        ({"max_restarts": -1}, ValueError, "max_restarts must be at least 0, got -1"),
        ({"back_off": "1"}, TypeError, "back_off must be a number, got '1'"),
        ({"timeout": 0}, ValueError, "timeout must be above 0, got 0"),
        ({"start_timeout": math.nan}, ValueError, "start_timeout must be finite, got nan"),
    ],
)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Workers(**{"number": 1, **options})


def pids_of(env):
    return [env.pool._workers_by_env[i]._process.pid for i in range(env.num_envs)]


def test_close_ends_all_processes_during_a_step(tmp_path):
    env = breaking(tmp_path)
    env.reset()
    processes = [worker._process for worker in set(env.pool._workers_by_env.values())]
    env.step_async(np.zeros(3, np.int64))
    assert all(worker.pipe.poll(60) for worker in env.pool._workers_by_env.values())
    env.close()
    assert [process.exitcode for process in processes] == [0, 0, 0]


def test_closed_environments_start_no_process(tmp_path):
    env = breaking(tmp_path)
    env.reset()
    env.close()
    env.close()
    with pytest.raises(ValueError, match="the environments are closed"):
        env.step(np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="the environments are closed"):
        env.get_attr("mood")
    assert env.failed_envs() == {}
    assert env.restarts == 0


@pytest.mark.parametrize("seconds", [math.inf, 1e12])
def test_long_timeouts(seconds):
    with closing(WorkerVecEnv([made], Workers(1, timeout=seconds, start_timeout=seconds))) as env:
        env.reset()
        assert env.step(np.zeros(1, np.int64))[0].shape == (1, 3)


def test_replay_without_steps_has_a_timeout(monkeypatch):
    limits, receive = [], Worker.receive
    monkeypatch.setattr(
        Worker, "receive", lambda worker, until: (limits.append(until), receive(worker, until))[1]
    )
    with closing(WorkerVecEnv([made], Workers(1, timeout=math.inf))) as env:
        env.reset()
        (record,) = env.env_method("record")
        assert env.replay({0: record}) == {0: None}
    assert not any(map(math.isnan, limits))


def test_close_between_the_halves_of_a_step_starts_no_process(tmp_path):
    env = breaking(tmp_path, back_off=0.0)
    env.reset()
    env.step_async(np.zeros(3, np.int64))
    env.close()
    with pytest.raises(ValueError, match="the environments are closed"):
        env.step_wait()
    assert env.restarts == 0


def test_wait_for_a_restart_with_a_long_timeout(tmp_path):
    with closing(breaking(tmp_path, "step raises", n_envs=2, number=2, start_timeout=math.inf)) as env:
        env.reset()
        until_back(env, 1)
        assert env.restarts == 1


def test_close_has_one_deadline_for_all_processes(monkeypatch):
    deadlines, wait = [], Worker.wait_and_end
    monkeypatch.setattr(worker_pool, "CLOSE_TIMEOUT", 0.1)
    monkeypatch.setattr(
        Worker, "wait_and_end", lambda worker, until: (deadlines.append(until), wait(worker, until))
    )
    env = WorkerVecEnv([Clinging] * 3, Workers(3))
    processes = [worker._process for worker in set(env.pool._workers_by_env.values())]
    env.close()
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 3
    assert len(deadlines) == 3
    assert len(set(deadlines)) == 1


def test_all_environments_are_closed_if_one_raises_in_close(tmp_path):
    marks = [tmp_path / str(i) for i in range(3)]
    WorkerVecEnv([partial(Marking, mark) for mark in marks], Workers(2)).close()
    assert all(mark.exists() for mark in marks)


def test_environment_that_raises_is_closed_and_its_process_continues(tmp_path):
    mark, folder = tmp_path / "closed", tmp_path / "breaks"
    folder.mkdir()
    breaks = partial(Breaking, Marking(mark), ["step raises"], folder)
    with closing(WorkerVecEnv([breaks, made], Workers(1, back_off=60.0))) as env:
        env.reset()
        list(played(env, 4))
        wait_until(mark.exists)
        assert env.failed_envs().keys() == {0}
        assert env.get_attr("mood", indices=1) == ["good"]


@pytest.mark.parametrize("fault", ["constructor raises", "cannot be pickled"])
def test_no_process_is_left_if_an_environment_cannot_be_created(tmp_path, fault):
    before, unpicklable = set(multiprocessing.active_children()), sys._getframe()
    if fault == "constructor raises":
        with pytest.raises(BrokenEnvironmentError, match="environment 1") as error:
            breaking(tmp_path, "init raises")
    else:
        with pytest.raises(TypeError, match="pickle") as error:
            WorkerVecEnv([made, made, lambda: unpicklable], Workers(3))
    assert error.value is not None
    assert set(multiprocessing.active_children()) <= before


@needs_proc
def test_signals_to_a_job_do_not_stop_the_workers(tmp_path):
    """The workers continue and close their environments, also if SIGTERM ends the fork server."""
    marks = [tmp_path / str(i) for i in range(3)]
    with closing(WorkerVecEnv([partial(Marking, mark) for mark in marks], Workers(3))) as env:
        env.reset()
        for pid in pids_of(env):
            assert os.getpgid(pid) != os.getpgrp()  # so Ctrl-C in a terminal does not reach it
            for signal_number in JOB:
                os.kill(pid, signal_number)
        os.kill(_forkserver._forkserver_pid, signal.SIGTERM)
        wait_until(is_gone, _forkserver._forkserver_pid)
        assert not any(LOST in info for *_, infos in played(env, 5) for info in infos)
    assert all(mark.exists() for mark in marks)


@pytest.mark.thorough
@needs_proc
def test_child_processes_of_environments_handle_signals_and_end_with_the_worker():
    with closing(WorkerVecEnv([Driven] * 4, Workers(4, back_off=0.0, **IMPATIENT))) as env:
        env.reset()
        signalled, orphaned, hung, closed = env.get_attr("engines")
        for pid in signalled:
            os.kill(pid, signal.SIGTERM)
            wait_until(is_gone, pid)
        assert not any(map(is_gone, orphaned + hung + closed))
        _, first, second, _ = pids_of(env)
        os.kill(first, signal.SIGKILL), os.kill(second, signal.SIGSTOP)
        env.get_attr("engines")
        for pid in orphaned + hung:
            wait_until(is_gone, pid)
        assert env.restarts == 2
    for pid in closed:
        wait_until(is_gone, pid)


@needs_proc
def test_no_process_is_left_after_the_parent_is_killed(tmp_path):
    """The parent is the worker process of an environment that has worker processes; one of these hangs."""
    with closing(WorkerVecEnv([partial(Parental, tmp_path)], Workers(1))) as env:
        env.reset()
        pids = env.get_attr("pids")[0]
        env.step_async(np.zeros(1, np.int64))
        wait_until(lambda: any(tmp_path.iterdir()))
        assert len(pids) == 6
        assert not any(map(is_gone, pids))
        os.kill(*pids_of(env), signal.SIGKILL)
        for pid in pids:
            wait_until(is_gone, pid)


@needs_proc
def test_no_program_is_left_after_the_pipe_is_closed():
    """The pipe of a killed parent may be closed before the worker can detect the end of the parent."""
    with closing(WorkerVecEnv([Driven], Workers(1))) as env:
        pids = [*env.get_attr("engines")[0], *pids_of(env)]
        assert not any(map(is_gone, pids))
        env.pool._workers_by_env[0].pipe.close()
        for pid in pids:
            wait_until(is_gone, pid)
