"""Environments in processes that go on in others: what was broken, and what breaks meanwhile."""

import os
import signal
from contextlib import closing, contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rlxf.envs import Workers, WorkerVecEnv
from rlxf.envs.errors import EpisodeLostError
from rlxf.envs.infos import LOST, row_of
from rlxf.envs.resuming import carried, episodes_of, go_on, put_back
from rlxf.training.archive import read_archive, write_archive
from tests.envs.workers.playing import played, until_back
from tests.envs.workers.worlds import IMPATIENT, QUICK, SHOWN, THIRD, VECTOR, breaking, made

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore:environment:RuntimeWarning")]


@contextmanager
def crowd(space=VECTOR, **options):
    with closing(
        WorkerVecEnv([partial(made, space=space)] * 3, Workers(3, **QUICK | {"back_off": 0.0} | options))
    ) as env:
        yield env


def kill(env, i, harm=signal.SIGKILL):
    process = env.crew._at[i]._process
    os.kill(process.pid, harm)
    if harm is signal.SIGKILL:
        process.join()


@pytest.mark.parametrize("told", [False, True])
def test_what_was_broken_shows_its_last_observation_until_it_is_back(told):
    """So the statistics of `VecNormalize` see no other observation than in the run that is gone on with."""
    with crowd(back_off=30.0) as inner:
        env = VecNormalize(inner)
        env.seed(0)
        env.reset()
        list(played(env, 5))
        last = inner._shown[1]
        kill(inner, 1)
        if told:
            env.step(np.zeros(3, np.int64))
        saved, arrays = episodes_of(env)
        wrappers = carried(env)
    with crowd() as inner:
        env = VecNormalize(inner)
        put_back(env, wrappers)
        go_on(env, saved, arrays)
        shown = []
        env.obs_rms.update = lambda observations: shown.append(observations[1].copy())
        rows = until_back(env, 1)
        lost = [row for row in rows if LOST in row[3][1]]
        assert len(lost) == 2 - told
        assert len(shown) == len(rows)
        for seen in shown[: len(lost) - 1]:
            np.testing.assert_array_equal(seen, last[0])
        terminal = env.unnormalize_obs(lost[-1][3][1]["terminal_observation"])
        np.testing.assert_allclose(terminal, last[0], atol=1e-5)


def stored(path, document, arrays):
    """What comes back from a file."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    write_archive(path, {"run": document}, {"episodes": tensors})
    archive = read_archive(path)
    return archive.documents["run"], {name: x.numpy() for name, x in archive.tensors["episodes"].items()}


@pytest.mark.parametrize("shown", [*SHOWN, "large"])
def test_any_kind_of_last_observation_outlasts_a_file(tmp_path, shown):
    space = SHOWN.get(shown, spaces.Box(0, 255, (700, 500, 3), np.uint8))
    with crowd(space) as env, crowd(space) as other:
        env.reset()
        *_, (last, *_) = played(env, 3)
        kill(env, 1), kill(env, 2)
        go_on(other, *stored(tmp_path / "file", *episodes_of(env)))
        (seen, _, _, infos), *_ = played(other, 1)
        assert [LOST in info for info in infos] == [False, True, True]
        for i in (1, 2):
            np.testing.assert_equal(row_of(seen, i), row_of(last, i))


def test_what_dies_when_it_is_asked_for_its_episode_is_absent(tmp_path):
    """And does not tell of its fresh episode, in which the agent is not."""
    with crowd() as env:
        env.seed(0)
        env.reset()
        list(played(env, 5))
        ask = env.env_is_wrapped
        env.env_is_wrapped = lambda *asked: (kill(env, 1), ask(*asked))[1]
        saved, _ = episodes_of(env)
        assert ["absent" in record for record in saved["records"]] == [False, True, False]


def test_all_episodes_are_played_again_at_once(monkeypatch):
    here = DummyVecEnv([made] * 3)
    here.seed(0)
    here.reset()
    list(played(here, 9))
    asked = []
    with crowd() as env:
        ask = env.crew.ask
        monkeypatch.setattr(env.crew, "ask", lambda calls: (asked.append(list(calls)), ask(calls)))
        go_on(env, *episodes_of(here))
        assert asked[0] == [0, 1, 2]
        for one, other in zip(played(here, 30), played(env, 30), strict=True):
            np.testing.assert_equal(one[:3], other[:3])


def test_what_breaks_while_it_is_played_again_is_said(tmp_path):
    here = DummyVecEnv([made] * 3)
    here.seed(4)
    here.reset()
    list(played(here, 9))
    saved = episodes_of(here)
    assert len(saved[1]["actions.1"]) >= THIRD
    with closing(breaking(tmp_path, "step hangs", **IMPATIENT)) as env:
        with pytest.raises(EpisodeLostError, match="environment 1 did not answer"):
            go_on(env, *saved)
        env.reset()
        assert env.absent() == {}
        assert env.restarts == 1


def test_breaks_are_counted_on_where_the_episodes_are_lost():
    with crowd() as env, crowd() as other:
        env.seed(0)
        env.reset()
        kill(env, 1)
        until_back(env, 1)
        saved, arrays = episodes_of(env)
        saved["records"][0]["hash"] = "of another episode"
        with pytest.raises(EpisodeLostError, match="shows another episode"):
            go_on(other, saved, arrays)
        other.reset()
        assert (other.restarts, other.lost_steps) == (1, env.lost_steps)


def test_fresh_episodes_behind_a_resumption_come_of_the_seed():
    here = DummyVecEnv([made] * 3)
    here.seed(0)
    here.reset()
    saved, found = episodes_of(here), []
    for _ in range(2):
        with crowd() as env:
            go_on(env, *saved)
            assert env.crew.seeds == [0, 1, 2]
            kill(env, 1)
            found.append([observations[1] for observations, *_ in until_back(env, 1)][-2:])
    np.testing.assert_array_equal(*found)
