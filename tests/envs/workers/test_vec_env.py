"""Environments in processes: the same steps as without, and none that breaks takes others along."""

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

from rlxf.envs import BrokenEnvironmentError, Workers, WorkerVecEnv, make_vec_env
from rlxf.envs.infos import BROKEN, LOST
from tests.envs.workers.worlds import QUICK, VECTOR, breaking, made

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore:environment:RuntimeWarning")]

SHOWN = {
    "vector": VECTOR,
    "image": spaces.Box(0, 255, (8, 8, 1), np.uint8),
    "dict": spaces.Dict({"number": spaces.Discrete(4), "vector": VECTOR}),
    "tuple": spaces.Tuple([spaces.Discrete(4), VECTOR]),
}
BREAKS = {
    "step raises": "raised in step: ValueError: the simulator lost its mind",
    "step dies": "lost the process, which ended with exit code -9",
    "step exits": "lost the process, which ended with exit code 3",
    "step hangs": "did not answer for",
    "reset raises": "raised in step: ValueError",
    "reset hangs": "did not answer for",
}


def assert_same(one, other):
    np.testing.assert_equal(one, other)


def of_the_clock_left_out(infos):
    episodes = [{**info.get("episode", {}), "t": None} for info in infos]
    return [{**info, "episode": episode} for info, episode in zip(infos, episodes, strict=True)]


def played(env, steps, seed=0):
    """Each step of ``env``, with random actions."""
    draws = np.random.default_rng(seed)
    for _ in range(steps):
        yield env.step(draws.integers(0, 3, env.num_envs))


def until_back(env, i):
    """The steps up to the first one that environment i plays again after it broke."""
    broken, rows = False, []
    deadline = time.monotonic() + 60
    for observations, rewards, dones, infos in played(env, 10**6):
        rows.append((observations, rewards, dones, infos))
        if broken and LOST not in infos[i]:
            return rows
        broken |= LOST in infos[i]
        assert time.monotonic() < deadline
    return rows


@pytest.mark.parametrize("shown", SHOWN)
@pytest.mark.parametrize("number", [1, 2, 4])
def test_any_number_of_processes_gives_the_steps_of_none(number, shown):
    makes = [partial(made, space=SHOWN[shown])] * 4
    here, there = DummyVecEnv(makes), WorkerVecEnv(makes, Workers(number))
    with closing(there):
        here.seed(3), there.seed(3)
        assert_same(here.reset(), there.reset())
        for one, other in zip(played(here, 60), played(there, 60), strict=True):
            assert_same(one[:3], other[:3])
            assert_same(of_the_clock_left_out(one[3]), of_the_clock_left_out(other[3]))
            assert_same(here.reset_infos, there.reset_infos)
        assert (there.restarts, there.lost_steps) == (0, 0)


def test_make_vec_env_makes_the_same_with_workers():
    with closing(make_vec_env("CartPole-v1", 3, 5, workers=Workers(2))) as env:
        here = make_vec_env("CartPole-v1", 3, 5)
        assert isinstance(env.unwrapped, WorkerVecEnv)
        assert_same(here.reset(), env.reset())
        actions = np.random.default_rng(0).integers(0, 2, (40, 3))
        for action in actions:
            assert_same(here.step(action)[:3], env.step(action)[:3])


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


@pytest.mark.parametrize("plan", BREAKS)
def test_one_that_breaks_begins_anew_and_the_others_go_on(tmp_path, plan):
    alone = breaking(tmp_path)
    with closing(breaking(tmp_path, plan)) as env, closing(alone):
        first = env.reset()
        assert_same(first, alone.reset())
        with pytest.warns(RuntimeWarning, match=f"environment 1 {BREAKS[plan]}"):
            rows = until_back(env, 1)
        for one, other in zip(rows, played(alone, len(rows)), strict=True):
            for i in (0, 2):
                assert_same([part[i] for part in one[:3]], [part[i] for part in other[:3]])
        lost = [LOST in infos[1] for *_, infos in rows]
        assert env.restarts == 1
        assert env.lost_steps == sum(lost) >= 2
        assert lost == [*sorted(lost[:-1]), False]  # one after the other
        seen = [first, *(observations for observations, *_ in rows)]
        assert_lost_rows(seen[lost.index(True)], rows[lost.index(True) : -1])


def assert_lost_rows(before, lost):
    """Of environment 1: the last observation before the break, and all steps that were lost."""
    *_, (first, _, _, last_info) = lost
    for number, (observations, rewards, dones, infos) in enumerate(lost, start=1):
        last = number == len(lost)
        assert rewards[1] == 0
        assert dones[1] == last
        assert infos[1]["filler"]
        assert "episode" not in infos[1]
        assert infos[1].get("filler_next", False) != last
        assert (BROKEN in infos[1]) == (number == 1)
        assert last or (observations[1] == before[1]).all()
    assert (first[1] != before[1]).any()
    assert_same(last_info[1]["terminal_observation"], before[1])
    assert last_info[1]["TimeLimit.truncated"]


def test_a_warning_shows_the_traceback_of_the_environment(tmp_path):
    with closing(breaking(tmp_path, "step raises")) as env:
        env.reset()
        with pytest.warns(RuntimeWarning, match=r"restart 1 of 5(.|\n)*worlds.py.*in _raise"):
            until_back(env, 1)


@pytest.mark.parametrize("second", ["init raises", "init dies", "reset raises", "reset hangs"])
def test_a_restart_that_fails_is_one_more_break(tmp_path, second):
    with closing(breaking(tmp_path, "step raises", second)) as env:
        env.reset()
        until_back(env, 1)
        assert env.restarts == 2
        assert len(list(tmp_path.iterdir())) == 2


def test_a_process_that_dies_takes_its_environments_along_but_one_that_raises_does_not(tmp_path):
    for plan, lost in {"step raises": {1}, "step dies": {0, 1}}.items():
        marks = tmp_path / plan
        marks.mkdir()
        with closing(breaking(marks, plan, n_envs=4, number=2)) as env:
            env.reset()
            rows = until_back(env, 1)
            assert {i for *_, infos in rows for i, info in enumerate(infos) if LOST in info} == lost


def test_breaks_in_a_row_are_bounded(tmp_path):
    plan = ["step raises", *["init raises"] * 9]
    with closing(breaking(tmp_path, *plan, restarts=2)) as env:
        env.reset()
        with pytest.raises(
            BrokenEnvironmentError, match=r"environment 1 raised .* 3 times in a row, and 2 are"
        ) as raised:
            list(played(env, 10**5))
        assert "in _raise" in raised.value.__notes__[0]
        assert len(list(tmp_path.iterdir())) == 3


def test_an_episode_that_ends_sets_the_count_back(tmp_path):
    """More breaks in all than may come in a row."""
    with closing(breaking(tmp_path, *["reset raises"] * 3, restarts=1)) as env:
        env.reset()
        crew = env.crew
        for _ in played(env, 10**5):  # the fault is met behind an episode that ended, then at the restart
            crew.finished(1)
            if crew.restarts[1] == 3 and not env.absent():
                break
        assert crew.restarts[1] == 3


def test_what_never_began_is_an_error_at_once(tmp_path):
    with pytest.raises(BrokenEnvironmentError, match="environment 1 raised in its constructor: ValueError"):
        breaking(tmp_path, "init raises")
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / "0").unlink()
    with closing(breaking(tmp_path, "step dies", "reset raises")) as env:
        (tmp_path / "0").touch()
        with pytest.raises(BrokenEnvironmentError, match="environment 1 raised in reset"):
            env.reset()


def test_if_all_are_lost_it_waits_for_the_first(tmp_path):
    with closing(breaking(tmp_path, "step dies", number=1, back_off=0.3)) as env:
        env.reset()
        rows = until_back(env, 1)
        assert [LOST in infos[1] for *_, infos in rows] == [False, False, True, True, False]


def test_a_restart_plays_an_episode_that_was_not_played(tmp_path):
    with closing(breaking(tmp_path, "step raises", "step raises")) as env:
        first = [env.reset()[1]]
        first += [
            observations[1]
            for observations, _, dones, _ in until_back(env, 1) + until_back(env, 1)
            if dones[1]
        ]
        assert len(np.unique(first, axis=0)) == len(first)


def test_a_stack_of_frames_holds_none_of_the_episode_that_broke(tmp_path):
    with closing(VecFrameStack(breaking(tmp_path, "step raises"), 2)) as env:
        env.reset()
        *_, (observations, _, _, _), _ = until_back(env, 1)
        assert (observations[1, :3] == 0).all()


def test_those_that_broke_are_reset_with_the_others(tmp_path):
    with closing(breaking(tmp_path, "step raises", back_off=0.3)) as env:
        env.reset()
        list(played(env, 4))
        assert env.absent() == {1: True}
        env.seed(0)
        first = env.reset()
        assert env.absent() == {}
        alone = DummyVecEnv([made] * 3)
        alone.seed(0)
        assert_same(first, alone.reset())
        assert not any(LOST in info for info in env.step(np.zeros(3, np.int64))[3])


@pytest.mark.parametrize("fault", [{"number": 0}, {"number": 4}, {"timeout": 0}, {"restarts": -1}])
def test_numbers_out_of_range_are_refused(tmp_path, fault):
    with pytest.raises(ValueError, match=f"got {next(iter(fault.values()))}"):
        breaking(tmp_path, **fault)


def test_spaces_that_do_not_fit_are_refused():
    nested = spaces.Dict({"inner": spaces.Dict({"vector": VECTOR})})
    with pytest.raises(BrokenEnvironmentError, match="parts within parts"):
        WorkerVecEnv([partial(made, space=nested)], Workers(1, **QUICK))


def kill_at_random(crew, seconds):
    """Kill or stop processes of the crew, up and recovering, until so many seconds are over."""
    draws, deadline = random.Random(0), time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(draws.random() / 4)
        workers = {*crew._at.values(), *(each.worker for each in crew._recoveries if each.worker)}
        pids = [worker._process.pid for worker in workers]
        for pid in draws.sample(pids, min(1, len(pids))):
            with suppress(ProcessLookupError):
                os.kill(pid, draws.choice([signal.SIGKILL, signal.SIGSTOP]))


def test_whoever_is_killed_whenever_each_row_is_played_or_lost():
    crowd = Workers(3, timeout=0.5, start_timeout=2.0, restarts=10**6, back_off=0.02)
    with closing(WorkerVecEnv([made] * 6, crowd)) as env, ThreadPoolExecutor(1) as other:
        before, owed, lost = env.reset(), np.zeros(6, np.bool_), 0
        killing = other.submit(kill_at_random, env.crew, 4.0)
        for observations, rewards, dones, infos in played(env, 10**6):
            for i, info in enumerate(infos):
                assert (LOST in info) >= owed[i]
                assert (BROKEN in info) == (LOST in info and not owed[i])
                owed[i] = info.get("filler_next", False)
                assert not owed[i] or (observations[i] == before[i]).all()
                if LOST in info:
                    lost += 1
                    assert (rewards[i], dones[i]) == (0, not owed[i])
                else:
                    assert ("episode" in info) == dones[i]
            before = observations.copy()
            if killing.done() and not env.absent():
                break
        killing.result()
        assert env.lost_steps == lost > env.restarts > 0


ORPHANS = """
import sys, time
from pathlib import Path
import numpy as np
from tests.envs.workers.worlds import breaking

env = breaking(Path(sys.argv[1]), "step hangs", timeout=1000.0)
env.reset()
print(*(worker._process.pid for worker in set(env.crew._at.values())), flush=True)
while True:
    env.step(np.zeros(3, np.int64))
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_killed_parent_leaves_no_process_behind_even_if_one_hangs(tmp_path):
    marks, script = tmp_path / "marks", tmp_path / "script.py"
    marks.mkdir()
    script.write_text(ORPHANS)
    parent = subprocess.Popen(
        [sys.executable, script, marks],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": "."},
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    while not any(marks.iterdir()):
        time.sleep(0.01)
    assert len(pids) == 3
    assert all(map(is_alive, pids))
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + 30
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_close_ends_all_processes(tmp_path):
    env = breaking(tmp_path)
    env.reset()
    processes = [worker._process for worker in set(env.crew._at.values())]
    env.close()
    assert [process.exitcode for process in processes] == [0, 0, 0]


def test_signals_to_a_whole_job_are_left_to_the_parent(tmp_path):
    with closing(breaking(tmp_path)) as env:
        env.reset()
        for worker in set(env.crew._at.values()):
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(worker._process.pid, name)
        assert not any(LOST in info for *_, infos in played(env, 5) for info in infos)
