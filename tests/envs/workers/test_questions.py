"""Questions to environments in processes are answered, whatever became of the processes."""

import os
import signal
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from gymnasium import spaces

from rlxf.envs import BrokenEnvironmentError, Replayable, Workers, WorkerVecEnv
from rlxf.envs.infos import BROKEN, LOST
from rlxf.envs.workers import worker
from tests.envs.workers.playing import until_back
from tests.envs.workers.worlds import IMPATIENT, QUICK, breaking, made

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore:environment:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:The render mode"),
]
QUESTIONS = {
    "get_attr": (lambda env: env.get_attr("mood"), ["good"] * 3),
    "set_attr": (lambda env: env.set_attr("mood", "better"), None),
    "env_method": (lambda env: env.env_method("has_wrapper_attr", "mood"), [True] * 3),
    "env_is_wrapped": (lambda env: env.env_is_wrapped(Replayable), [True] * 3),
    "get_images": (lambda env: env.get_images(), [None] * 3),
}
CAUSES = {signal.SIGKILL: "lost the process", signal.SIGSTOP: "did not answer for"}


@pytest.fixture(scope="module")
def env():
    workers = Workers(3, restarts=10**6, back_off=0.0, **IMPATIENT)
    with closing(WorkerVecEnv([made] * 3, workers)) as env:
        env.seed(0)
        env.reset()
        yield env


@pytest.mark.parametrize("harm", CAUSES, ids=["killed", "stopped"])
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_finds_what_broke_and_is_asked_again(env, name, harm):
    question, answer = QUESTIONS[name]
    before = env.restarts
    os.kill(env.crew._at[1]._process.pid, harm)
    assert question(env) == answer
    assert env.restarts == before + 1
    assert env.absent().keys() == {1}
    (*_, infos), *_, (_, _, dones, last), _ = until_back(env, 1)
    assert CAUSES[harm] in infos[1][BROKEN]
    assert dones[1]
    assert last[1]["TimeLimit.truncated"]
    assert not any(LOST in infos[i] for i in (0, 2))


def test_a_question_that_breaks_it_each_time_ends_with_an_error(tmp_path):
    with closing(breaking(tmp_path, *["ask dies"] * 9, restarts=2)) as env:
        env.reset()
        with pytest.raises(BrokenEnvironmentError, match=r"environment 1 .* 3 times in a row, and 2 are"):
            env.get_attr("mood")
        assert len(list(tmp_path.iterdir())) == 3


def test_one_that_hangs_over_a_question_is_asked_anew(tmp_path):
    with closing(breaking(tmp_path, "ask hangs", **IMPATIENT)) as env:
        env.reset()
        assert env.get_attr("mood") == ["good"] * 3
        assert env.restarts == 1


def test_an_answer_that_nobody_waited_for_is_that_of_no_other_question(tmp_path):
    """As behind Ctrl-C while environments are stepped."""
    with closing(breaking(tmp_path)) as env:
        env.reset()
        env.step_async(np.zeros(3, np.int64))
        assert env.get_attr("mood") == ["good"] * 3
        env.step_async(np.zeros(3, np.int64))
        assert all(worker.pipe.poll(60) for worker in env.crew._at.values())
        assert env.absent() == {}
        assert env.step(np.zeros(3, np.int64))[0].shape == (3, 3)
        assert env.restarts == 0


@pytest.mark.parametrize("amid", ["a question", "an answer"])
def test_one_that_is_stopped_amid_a_message_has_broken(monkeypatch, amid):
    """No pipe holds as much at once, so that whoever writes waits for whoever reads."""
    monkeypatch.setattr(worker, "STALL", 0.2)
    large = spaces.Box(0, 255, (1000, 1000, 1), np.uint8)
    with closing(WorkerVecEnv([partial(made, space=large)], Workers(1, **IMPATIENT))) as env:
        env.reset()
        process = env.crew._at[0]._process
        if amid == "an answer":
            env.step_async(np.zeros(1, np.int64))
            env.crew._at[0].pipe.poll(60)
        os.kill(process.pid, signal.SIGSTOP)
        if amid == "an answer":
            *_, infos = env.step_wait()
            assert "did not answer for" in infos[0][BROKEN]
        else:
            env.set_attr("mood", np.zeros(10**6))
        assert env.restarts == 1


def test_a_question_may_come_before_the_first_reset(tmp_path):
    with closing(breaking(tmp_path, "ask dies")) as env, closing(breaking(tmp_path)) as whole:
        assert env.get_attr("mood") == ["good"] * 3
        assert (env.reset() == whole.reset()).all()
        assert env.absent() == {}


def test_one_that_raises_is_as_it_was_while_another_dies(tmp_path):
    """Both over one question: the error is told, and what died begins anew."""
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    plans = ["ask raises"], ["ask dies"]
    makes = [partial(made, plan, folder) for plan, folder in zip(plans, folders, strict=True)]
    with closing(WorkerVecEnv(makes, Workers(2, **QUICK))) as env:
        env.reset()
        with pytest.raises(RuntimeError, match="environment 0 raised in get_attr: ValueError"):
            env.get_attr("mood")
        assert env.absent().keys() == {1}
        assert env.get_attr("mood") == ["good"] * 2


def test_the_methods_of_a_vec_env(tmp_path):
    with closing(breaking(tmp_path, number=2)) as env:
        env.set_attr("colour", 7, indices=[0, 2])
        assert env.get_attr("colour", indices=[2, 0]) == [7, 7]
        with pytest.raises(AttributeError, match=r"environment 1 .*colour"):
            env.get_attr("colour")
        assert env.env_method("has_wrapper_attr", name="colour") == [True, False, True]
        with pytest.raises(RuntimeError, match="environment 0 raised in env_method: TypeError"):
            env.env_method("record", "too", "much")
        assert env.restarts == 0
