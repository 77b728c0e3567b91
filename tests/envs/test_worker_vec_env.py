"""`WorkerVecEnv`: it equals `DummyVecEnv`, and a failure does not affect the other environments."""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

from rlxf.envs import BrokenEnvironmentError, Workers, WorkerVecEnv, make_vec_env, worker_pool
from rlxf.envs.infos import BROKEN, LOST
from rlxf.evaluation import evaluate
from tests.envs.faulty_envs import (
    IMPATIENT,
    OBSERVATION_SPACES,
    QUICK,
    VECTOR,
    Global,
    breaking,
    made,
    played,
    until_back,
)
from tests.evaluation.worlds import Idle

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore:environment:RuntimeWarning")]

BREAKS = {
    "step raises": "raised in step: ValueError: the simulator lost its mind",
    "step dies": "failed because its process ended with exit code -9",
    "step exits": "failed because its process ended with exit code 3",
    "step hangs": "did not answer for",
    "reset raises": "raised in step: ValueError",
    "reset hangs": "did not answer for",
}


def assert_same(one, other):
    np.testing.assert_equal(one, other)


def without_times(infos):
    episodes = [{**info.get("episode", {}), "t": None} for info in infos]
    return [{**info, "episode": episode} for info, episode in zip(infos, episodes, strict=True)]


@pytest.mark.parametrize(
    ("number", "space_name"),
    [(1, "vector"), (2, "vector"), (4, "vector"), (2, "image"), (2, "dict"), (2, "tuple")],
)
def test_steps_equal_dummy_vec_env_for_any_number_of_processes(number, space_name):
    makes = [partial(made, space=OBSERVATION_SPACES[space_name])] * 4
    local, remote = DummyVecEnv(makes), WorkerVecEnv(makes, Workers(number))
    with closing(remote):
        local.seed(3), remote.seed(3)
        assert_same(local.reset(), remote.reset())
        for one, other in zip(played(local, 40), played(remote, 40), strict=True):
            assert_same(one[:3], other[:3])
            assert_same(without_times(one[3]), without_times(other[3]))
            assert_same(local.reset_infos, remote.reset_infos)
        assert (remote.restarts, remote.lost_steps) == (0, 0)


def timeouts(*plan):
    """Return short timeouts for plans with an environment that hangs."""
    return IMPATIENT if any("hangs" in each for each in plan) else {}


def test_make_vec_env_with_workers_equals_that_without():
    with closing(make_vec_env("CartPole-v1", 3, 5, workers=Workers(2))) as env:
        local = make_vec_env("CartPole-v1", 3, 5)
        assert isinstance(env.unwrapped, WorkerVecEnv)
        assert_same(local.reset(), env.reset())
        actions = np.random.default_rng(0).integers(0, 2, (40, 3))
        for action in actions:
            assert_same(local.step(action)[:3], env.step(action)[:3])


@pytest.mark.parametrize("plan", BREAKS)
def test_failed_environment_is_restarted_and_the_others_continue(tmp_path, plan):
    reference = DummyVecEnv([made] * 3)
    reference.seed(0)
    with closing(breaking(tmp_path, plan, **timeouts(plan))) as env:
        first = env.reset()
        assert_same(first, reference.reset())
        with pytest.warns(RuntimeWarning, match=f"environment 1 {BREAKS[plan]}"):
            rows = until_back(env, 1)
        for one, other in zip(rows, played(reference, len(rows)), strict=True):
            for i in (0, 2):
                assert_same([part[i] for part in one[:3]], [part[i] for part in other[:3]])
        lost = [LOST in infos[1] for *_, infos in rows]
        assert env.restarts == 1
        assert env.lost_steps == sum(lost) >= 2
        assert lost == [*sorted(lost[:-1]), False]  # the lost steps are consecutive
        observations = [first, *(row[0] for row in rows)]
        assert_lost_rows(observations[lost.index(True)], rows[lost.index(True) : -1])


def assert_lost_rows(before, lost):
    """Check the lost steps of environment 1, given the last observations before the failure."""
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


def test_warning_has_the_traceback_of_the_environment(tmp_path):
    with closing(breaking(tmp_path, "step raises")) as env:
        env.reset()
        with pytest.warns(RuntimeWarning, match=r"restart 1 of 5(.|\n)*faulty_envs.py.*in _raise"):
            until_back(env, 1)


@pytest.mark.parametrize("second", ["init raises", "init dies", "reset raises", "reset hangs"])
def test_failed_restart_is_repeated(tmp_path, second):
    with closing(breaking(tmp_path, "step raises", second, **timeouts(second))) as env:
        env.reset()
        until_back(env, 1)
        assert env.restarts == 2
        assert len(list(tmp_path.iterdir())) == 2


def test_dead_process_loses_all_its_environments_but_an_exception_only_one(tmp_path):
    for plan, lost in {"step raises": {1}, "step dies": {0, 1}}.items():
        marks = tmp_path / plan
        marks.mkdir()
        with closing(breaking(marks, plan, n_envs=4, number=2)) as env:
            env.reset()
            rows = until_back(env, 1)
            assert {i for *_, infos in rows for i, info in enumerate(infos) if LOST in info} == lost


def test_failures_in_a_row_are_limited(tmp_path):
    plan = ["step raises", *["init raises"] * 9]
    with closing(breaking(tmp_path, *plan, max_restarts=2)) as env:
        env.reset()
        with pytest.raises(
            BrokenEnvironmentError, match=r"environment 1 raised .* 3 times in a row, and 2 restarts"
        ) as raised:
            list(played(env, 10**5))
        assert "in _raise" in raised.value.__notes__[0]
        assert len(list(tmp_path.iterdir())) == 3


def test_final_failure_in_an_evaluation_raises_again_in_later_calls(tmp_path):
    """The evaluation resumes paused environments at its end, although one of them has failed."""
    calls = (WorkerVecEnv.reset, lambda env: env.get_attr("mood"), lambda env: env.step(np.zeros(3, int)))
    with closing(breaking(tmp_path, "step raises", max_restarts=0)) as env:
        for call in (lambda env: evaluate(Idle(), env, 9), *calls):
            with pytest.raises(
                BrokenEnvironmentError, match=r"environment 1 raised in step.* 1 time in a row"
            ):
                call(env)


def test_finished_episode_resets_the_failure_count(tmp_path):
    """The total number of failures exceeds the limit of failures in a row."""
    with closing(breaking(tmp_path, *["reset raises"] * 3, max_restarts=1)) as env:
        env.reset()
        for _ in played(env, 10**5):  # the reset fails after a finished episode, then at the restart
            env.pool.count_step(1, ended=True)
            if env.restarts == 3 and not env.failed_envs():
                break
        assert env.restarts == 3


def test_enough_steps_reset_the_failure_count(tmp_path, monkeypatch):
    """The total number of failures exceeds the limit of failures in a row; each follows two good steps."""
    monkeypatch.setattr(worker_pool, "GOOD_STEPS", 2)
    with closing(breaking(tmp_path, *["step raises"] * 3, max_restarts=1, back_off=0.0)) as env:
        env.seed(3)  # no episode ends with this seed
        env.reset()
        for *_, infos in played(env, 10**5):
            assert "episode" not in infos[1]
            if env.restarts == 3:
                break


def test_failure_before_or_in_the_first_reset_raises(tmp_path):
    with pytest.raises(BrokenEnvironmentError, match="environment 1 raised in its constructor: ValueError"):
        breaking(tmp_path, "init raises")
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / "0").unlink()
    with closing(breaking(tmp_path, "step dies", "reset raises")) as env:
        (tmp_path / "0").touch()
        with pytest.raises(BrokenEnvironmentError, match="environment 1 raised in reset"):
            env.reset()


def test_step_waits_if_all_environments_are_lost(tmp_path):
    with closing(breaking(tmp_path, "step dies", number=1, back_off=0.3)) as env:
        env.reset()
        rows = until_back(env, 1)
        assert [LOST in infos[1] for *_, infos in rows] == [False, False, True, True, False]


def test_restart_starts_a_new_episode(tmp_path):
    with closing(breaking(tmp_path, "step raises", "step raises")) as env:
        first = [env.reset()[1]]
        first += [
            observations[1]
            for observations, _, dones, _ in until_back(env, 1) + until_back(env, 1)
            if dones[1]
        ]
        assert len(np.unique(first, axis=0)) == len(first)


def test_frame_stack_has_no_frames_of_the_failed_episode(tmp_path):
    with closing(VecFrameStack(breaking(tmp_path, "step raises"), 2)) as env:
        env.reset()
        *_, (observations, _, _, _), _ = until_back(env, 1)
        assert (observations[1, :3] == 0).all()


def test_failed_environments_are_reset_with_the_others(tmp_path):
    with closing(breaking(tmp_path, "step raises", back_off=0.3)) as env:
        env.reset()
        list(played(env, 4))
        assert env.failed_envs().keys() == {1}
        env.seed(0)
        first = env.reset()
        assert env.failed_envs() == {}
        reference = DummyVecEnv([made] * 3)
        reference.seed(0)
        assert_same(first, reference.reset())
        assert not any(LOST in info for info in env.step(np.zeros(3, np.int64))[3])


def test_seed_determines_draws_from_global_generators():
    observations = []
    for seed in (2**40, 2**40, 7):
        with closing(WorkerVecEnv([Global] * 3, Workers(2))) as env:
            env.seed(seed)
            observations.append(env.reset())
    assert_same(*observations[:2])
    assert len(np.unique(np.stack(observations[1:]))) == 18


@pytest.mark.parametrize("fault", [{"number": 0}, {"number": 4}, {"timeout": 0}, {"max_restarts": -1}])
def test_options_out_of_range_raise(tmp_path, fault):
    with pytest.raises(ValueError, match=f"got {next(iter(fault.values()))}"):
        breaking(tmp_path, **fault)


def test_nested_spaces_raise():
    nested = spaces.Dict({"inner": spaces.Dict({"vector": VECTOR})})
    with pytest.raises(BrokenEnvironmentError, match="is nested or has text"):
        WorkerVecEnv([partial(made, space=nested)], Workers(1, **QUICK))


def kill_at_random(crew, seconds):
    """Kill or stop running and restarting processes of the crew, for the given time."""
    rng, deadline = random.Random(0), time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(rng.random() / 8)
        workers = {
            *crew._workers_by_env.values(),
            *(each.worker for each in crew._pending_restarts if each.worker),
        }
        pids = [worker._process.pid for worker in workers]
        for pid in rng.sample(pids, min(1, len(pids))):
            with suppress(ProcessLookupError):
                os.kill(pid, rng.choice([signal.SIGKILL, signal.SIGSTOP]))


def test_each_row_is_played_or_lost_under_random_kills():
    crowd = Workers(3, timeout=0.25, start_timeout=0.4, max_restarts=10**6, back_off=0.0)
    with closing(WorkerVecEnv([made] * 6, crowd)) as env, ThreadPoolExecutor(1) as other:
        before, lost_next, lost = env.reset(), np.zeros(6, np.bool_), 0
        killing = other.submit(kill_at_random, env.pool, 1.5)
        for observations, rewards, dones, infos in played(env, 10**6):
            for i, info in enumerate(infos):
                assert (LOST in info) >= lost_next[i]
                assert (BROKEN in info) == (LOST in info and not lost_next[i])
                lost_next[i] = info.get("filler_next", False)
                assert not lost_next[i] or (observations[i] == before[i]).all()
                if LOST in info:
                    lost += 1
                    assert (rewards[i], dones[i]) == (0, not lost_next[i])
                else:
                    assert ("episode" in info) == dones[i]
            before = observations.copy()
            if killing.done() and not env.failed_envs():
                break
        killing.result()
        assert env.lost_steps == lost > env.restarts > 0
