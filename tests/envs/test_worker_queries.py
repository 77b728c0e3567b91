"""Queries of environments in worker processes, which fail and are restarted."""

import os
import signal
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from gymnasium import spaces

from rlxf.envs import ActionReplay, BrokenEnvironmentError, Workers, WorkerVecEnv, worker
from rlxf.envs.infos import BROKEN, LOST
from tests.envs.faulty_envs import IMPATIENT, QUICK, breaking, is_stopped, made, until_back, wait_until

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore:environment:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:The render mode"),
]
QUERIES = {
    "get_attr": (lambda env: env.get_attr("mood"), ["good"] * 3),
    "set_attr": (lambda env: env.set_attr("mood", "better"), None),
    "env_method": (lambda env: env.env_method("has_wrapper_attr", "mood"), [True] * 3),
    "env_is_wrapped": (lambda env: env.env_is_wrapped(ActionReplay), [True] * 3),
    "get_images": (lambda env: env.get_images(), [None] * 3),
}
CAUSES = {signal.SIGKILL: "its process ended", signal.SIGSTOP: "did not answer for"}


@pytest.fixture(scope="module")
def env():
    workers = Workers(3, max_restarts=10**6, back_off=0.0, **IMPATIENT)
    with closing(WorkerVecEnv([made] * 3, workers)) as env:
        env.seed(0)
        env.reset()
        yield env


@pytest.mark.parametrize("signal_number", CAUSES, ids=["killed", "stopped"])
@pytest.mark.parametrize("name", QUERIES)
def test_query_detects_a_failure_and_is_repeated(env, name, signal_number):
    query, reply = QUERIES[name]
    before = env.restarts
    os.kill(env.pool._workers_by_env[1]._process.pid, signal_number)
    assert query(env) == reply
    assert env.restarts == before + 1
    assert env.failed_envs().keys() == {1}
    (*_, infos), *_, (_, _, dones, last), _ = until_back(env, 1)
    assert CAUSES[signal_number] in infos[1][BROKEN]
    assert dones[1]
    assert last[1]["TimeLimit.truncated"]
    assert not any(LOST in infos[i] for i in (0, 2))


def test_query_that_fails_each_time_raises(tmp_path):
    with closing(breaking(tmp_path, *["ask dies"] * 9, max_restarts=2)) as env:
        env.reset()
        with pytest.raises(BrokenEnvironmentError, match=r"environment 1 .* 3 times in a row, and 2"):
            env.get_attr("mood")
        assert len(list(tmp_path.iterdir())) == 3


def test_query_is_repeated_after_a_timeout(tmp_path):
    with closing(breaking(tmp_path, "ask hangs", **IMPATIENT)) as env:
        env.reset()
        assert env.get_attr("mood") == ["good"] * 3
        assert env.restarts == 1


def test_unread_reply_is_discarded(tmp_path):
    """A reply is unread, for example, after Ctrl-C during a step."""
    with closing(breaking(tmp_path)) as env:
        env.reset()
        env.step_async(np.zeros(3, np.int64))
        assert env.get_attr("mood") == ["good"] * 3
        env.step_async(np.zeros(3, np.int64))
        assert all(worker.pipe.poll(60) for worker in env.pool._workers_by_env.values())
        assert env.failed_envs() == {}
        assert env.step(np.zeros(3, np.int64))[0].shape == (3, 3)
        assert env.restarts == 0


@pytest.mark.parametrize("message", ["call", "reply"])
def test_process_stopped_within_a_message_is_restarted(monkeypatch, message):
    """The messages are larger than the buffer of a pipe, so the writer waits for the reader."""
    monkeypatch.setattr(worker, "STALL_TIMEOUT", 0.2)
    large = spaces.Box(0, 255, (1000, 1000, 1), np.uint8)
    with closing(WorkerVecEnv([partial(made, space=large)], Workers(1, timeout=0.5))) as env:
        env.reset()
        process = env.pool._workers_by_env[0]._process
        if message == "reply":
            env.step_async(np.zeros(1, np.int64))
            env.pool._workers_by_env[0].pipe.poll(60)
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(is_stopped, process.pid)  # until then, a write goes on as long as the reader reads
        if message == "reply":
            *_, infos = env.step_wait()
            assert "did not answer for" in infos[0][BROKEN]
        else:
            env.set_attr("mood", np.zeros(10**6))
        assert env.restarts == 1


def test_query_before_the_first_reset(tmp_path):
    with closing(breaking(tmp_path, "ask dies")) as env, closing(breaking(tmp_path)) as whole:
        assert env.get_attr("mood") == ["good"] * 3
        assert (env.reset() == whole.reset()).all()
        assert env.failed_envs() == {}


def test_query_raises_in_one_environment_while_another_dies(tmp_path):
    """The error is raised, the environment that raised is unchanged, and the dead one is restarted."""
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    plans = ["ask raises"], ["ask dies"]
    makes = [partial(made, plan, folder) for plan, folder in zip(plans, folders, strict=True)]
    with closing(WorkerVecEnv(makes, Workers(2, **QUICK))) as env:
        env.reset()
        with pytest.raises(RuntimeError, match="environment 0 raised in get_attr: ValueError"):
            env.get_attr("mood")
        assert env.failed_envs().keys() == {1}
        assert env.get_attr("mood") == ["good"] * 2


def test_vec_env_methods(tmp_path):
    with closing(breaking(tmp_path, number=2)) as env:
        env.set_attr("color", 7, indices=[0, 2])
        assert env.get_attr("color", indices=[2, 0]) == [7, 7]
        with pytest.raises(AttributeError, match=r"environment 1 .*color"):
            env.get_attr("color")
        assert env.env_method("has_wrapper_attr", name="color") == [True, False, True]
        with pytest.raises(RuntimeError, match="environment 0 raised in env_method: TypeError"):
            env.env_method("record", "too", "much")
        assert env.restarts == 0
