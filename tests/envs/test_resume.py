"""Replayed episodes, and the resumption of vector environments, also with failures of worker processes."""

import copy
import os
import pickle
import signal
from contextlib import closing, contextmanager
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rlxf.envs import ActionReplay, PreviousTransition, Workers, WorkerVecEnv, make_vec_env
from rlxf.envs.action_replay import MAX_RECORDED_STEPS
from rlxf.envs.infos import LOST
from rlxf.envs.make import make_vec_env_from
from rlxf.envs.resume import episode_state, resume_episodes
from rlxf.envs.spaces import row_of
from rlxf.envs.wrapper_state import load_wrapper_state, wrapper_state
from rlxf.training.archive import read_archive, write_archive
from rlxf.utils.errors import EpisodeLostError
from tests.envs.faulty_envs import (
    IMPATIENT,
    OBSERVATION_SPACES,
    QUICK,
    THIRD,
    VECTOR,
    breaking,
    made,
    played,
    until_back,
)

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore:environment:RuntimeWarning")]

ACTIONS = np.random.default_rng(0).integers(2, size=300).tolist()


def cartpole():
    return ActionReplay(gymnasium.make("CartPole-v1"))


def observations_of(env, actions):
    """Play the actions, with a reset after each episode, and return the observations."""
    observations = []
    for action in actions:
        observation, *_, terminated, truncated, _ = env.step(action)
        observations.append(observation)
        if terminated or truncated:
            observations.append(env.reset()[0])
    return np.array(observations)


def test_first_episode_has_the_given_seed():
    inner = gymnasium.make("CartPole-v1")
    assert np.array_equal(cartpole().reset(seed=5)[0], inner.reset(seed=5)[0])


def test_episodes_depend_only_on_the_seed_and_their_number():
    """The first observation of an episode does not depend on the actions in earlier episodes."""
    starts = []
    for length in (1, 3):
        env = cartpole()
        env.reset(seed=5)
        first_observations = []
        for _ in range(4):
            for action in ACTIONS[:length]:
                env.step(action)
            first_observations.append(env.reset()[0])
        starts.append(first_observations)
    assert np.array_equal(*starts)
    assert len({tuple(start) for start in starts[0]}) == 4


class Doubling(gymnasium.ActionWrapper):
    """Wrapper that changes the array of the action."""

    def action(self, action):
        action *= 2
        return action


def test_an_environment_that_changes_its_action_is_replayed():
    env, replayed = (ActionReplay(Doubling(gymnasium.make("Pendulum-v1"))) for _ in range(2))
    env.reset(seed=5)
    for _ in range(3):
        env.step(np.array([0.1], np.float32))
    np.testing.assert_allclose(env.record()["actions"], 0.1)
    assert replayed.replay(env.record()) is None


@pytest.mark.parametrize("cut", [0, 1, 57, 200])
def test_replayed_episode_continues_equally(cut):
    env = cartpole()
    env.reset(seed=5)
    observations_of(env, ACTIONS[:cut])
    record = env.record()
    expected = observations_of(env, ACTIONS[cut:])
    replayed = cartpole()
    assert replayed.replay(record) is None
    assert np.array_equal(observations_of(replayed, ACTIONS[cut:]), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 6},
        {"number": 3},
        {"actions": np.array(ACTIONS[:4])},
        {"actions": 1 - np.array(ACTIONS[:5])},
    ],
    ids=str,
)
def test_replay_detects_a_different_episode(change):
    env = cartpole()
    env.reset(seed=5)
    for action in ACTIONS[:5]:
        env.step(action)
    assert "results in a different episode" in cartpole().replay(env.record() | change)


def test_a_copy_in_an_episode_continues_it_alone():
    env = make_vec_env("CartPole-v1", 2, seed=0)
    env.reset()
    env.step(np.array([0, 1]))
    copied = copy.deepcopy(env)
    for each in (env, copied):
        each.step(np.array([1, 1]))
    for record, expected in zip(copied.env_method("record"), env.env_method("record"), strict=True):
        np.testing.assert_equal(record, expected)
        assert cartpole().replay(record) is None


def test_pickled_environments_continue_the_episode_and_can_be_replayed_from_the_next():
    env = make_vec_env("CartPole-v1", 2, seed=0)
    env.reset()
    env.step(np.array([0, 1]))
    unpickled = pickle.loads(pickle.dumps(env))  # noqa: S301
    steps = [each.step(np.array([1, 1]))[0] for each in (env, unpickled)]
    np.testing.assert_equal(*steps)
    for each in (unpickled, copy.deepcopy(unpickled)):
        assert all("was pickled" in record["lost"] for record in each.env_method("record"))
    for each in (env, unpickled):
        each.env_method("reset")
        each.step(np.array([1, 0]))
    for record, expected in zip(unpickled.env_method("record"), env.env_method("record"), strict=True):
        np.testing.assert_equal(record, expected)
        assert cartpole().replay(record) is None
        assert unpickled.env_method("replay", record, indices=0) == [None]


def test_reset_with_options_and_long_episodes_are_not_replayable(monkeypatch):
    env = cartpole()
    assert "not at all" in env.record()["lost"]
    env.reset(seed=1, options={"low": -0.01})
    assert "options" in env.record()["lost"]
    env.reset()
    monkeypatch.setattr("rlxf.envs.action_replay.MAX_RECORDED_STEPS", 2)
    for _ in range(3):
        env.step(0)
    assert "longer than 2 steps" in env.record()["lost"]
    assert MAX_RECORDED_STEPS >= 10_000


def test_episodes_without_a_seed_differ():
    first = [cartpole().reset()[0] for _ in range(2)]
    assert not np.array_equal(*first)


@pytest.mark.parametrize("n_envs", [1, 4])
def test_observations_do_not_depend_on_the_number_of_environments(n_envs):
    env = make_vec_env("CartPole-v1", n_envs, seed=7)
    observations = [env.reset()[0]]
    for action in ACTIONS:
        observations.append(env.step(np.full(n_envs, action))[0][0])
    single = cartpole()
    assert np.array_equal(observations[0], single.reset(seed=7)[0])
    steps = [single.step(action) for action in ACTIONS[:5]]
    assert np.array_equal(observations[1:6], [step[0] for step in steps])


def test_previous_transition_persists_across_episodes_in_an_action_replay():
    """`ActionReplay` resets the inner environment with a seed, which must not clear the outer wrappers."""
    env = make_vec_env("CartPole-v1", 1, seed=7, previous_transition=True)
    env.reset()
    done = [env.step(np.array([1]))[0]["previous_done"][0, 0] for _ in range(40)]
    assert sum(done) > 1
    assert env.env_is_wrapped(PreviousTransition) == env.env_is_wrapped(ActionReplay) == [True]


class Nested(gymnasium.Env):
    """Random observations of a nested Tuple space, in episodes of 7 steps."""

    observation_space = spaces.Tuple((VECTOR, spaces.Dict({"a": spaces.Discrete(9)})))
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observation(0), {}

    def step(self, action):
        self.steps += 1
        return self._observation(action), float(action), False, self.steps == 7, {}

    def _observation(self, action):
        vector = self.np_random.normal(size=VECTOR.shape).astype(np.float32)
        return vector + action, {"a": self.np_random.integers(9)}


@pytest.mark.parametrize("steps", [0, 4, 7, 10])
def test_episodes_with_nested_observations_are_resumed(tmp_path, steps):
    def played_rows(env, steps):
        """Return observations, rewards, ends, and returns and lengths of ended episodes, by step."""
        rows = []
        for step in range(steps):
            (vectors, parts), rewards, dones, infos = env.step(np.arange(3) * step % 3)
            ended = [(info["episode"]["r"], info["episode"]["l"]) for info in infos if "episode" in info]
            rows.append([vectors.tolist(), parts["a"].tolist(), rewards.tolist(), dones.tolist(), ended])
        return rows

    env, resumed = (make_vec_env_from(Nested, 3, 5, ActionReplay) for _ in range(2))
    env.reset()
    played_rows(env, steps)
    resume_episodes(resumed, *stored(tmp_path / "state", *episode_state(env)))
    expected = played_rows(env, 20)
    assert any(row[-1] for row in expected)
    assert played_rows(resumed, 20) == expected


@contextmanager
def crowd(space=VECTOR, **options):
    with closing(
        WorkerVecEnv([partial(made, space=space)] * 3, Workers(3, **QUICK | {"back_off": 0.0} | options))
    ) as env:
        yield env


def kill(env, i):
    process = env.pool._workers_by_env[i]._process
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.parametrize("reported", [False, True])
def test_failed_environment_repeats_its_last_observation_after_resuming(reported):
    """The statistics of `VecNormalize` thus get the same observations as in an uninterrupted run."""
    with crowd(back_off=30.0) as inner:
        env = VecNormalize(inner)
        env.seed(0)
        env.reset()
        list(played(env, 5))
        last = inner._last_observations[1]
        kill(inner, 1)
        if reported:
            env.step(np.zeros(3, np.int64))
        saved, arrays = episode_state(env)
        wrappers = wrapper_state(env)
    with crowd() as inner:
        env = VecNormalize(inner)
        load_wrapper_state(env, wrappers)
        resume_episodes(env, saved, arrays)
        normalized = []
        env.obs_rms.update = lambda observations: normalized.append(observations[1].copy())
        rows = until_back(env, 1)
        lost = [row for row in rows if LOST in row[3][1]]
        assert len(lost) == 2 - reported
        assert len(normalized) == len(rows)
        for observation in normalized[: len(lost) - 1]:
            np.testing.assert_array_equal(observation, last[0])
        terminal = env.unnormalize_obs(lost[-1][3][1]["terminal_observation"])
        np.testing.assert_allclose(terminal, last[0], atol=1e-5)


def test_an_environment_that_fails_after_resuming_repeats_its_last_observation(tmp_path):
    with crowd() as env, crowd() as other:
        env.seed(0)
        env.reset()
        *_, (last, *_) = played(env, 5)
        resume_episodes(other, *stored(tmp_path / "file", *episode_state(env)))
        kill(other, 1)
        (observations, _, _, infos), *_ = played(other, 1)
        assert LOST in infos[1]
        np.testing.assert_array_equal(observations[1], last[1])


def stored(path, document, arrays):
    """Write the state to a file and read it again."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    write_archive(path, {"run": document}, {"episodes": tensors})
    archive = read_archive(path)
    return archive.documents["run"], {name: x.numpy() for name, x in archive.tensors["episodes"].items()}


@pytest.mark.parametrize("space_name", [*OBSERVATION_SPACES, "large"])
def test_last_observation_of_any_space_is_saved(tmp_path, space_name):
    space = OBSERVATION_SPACES.get(space_name, spaces.Box(0, 255, (700, 500, 3), np.uint8))
    with crowd(space) as env, crowd(space) as other:
        env.reset()
        *_, (last, *_) = played(env, 3)
        kill(env, 1), kill(env, 2)
        resume_episodes(other, *stored(tmp_path / "file", *episode_state(env)))
        (observations, _, _, infos), *_ = played(other, 1)
        assert [LOST in info for info in infos] == [False, True, True]
        for i in (1, 2):
            np.testing.assert_equal(row_of(observations, i), row_of(last, i))


def test_environment_that_dies_during_the_saving_is_stored_as_failed(tmp_path):
    """The record of its new episode is not used, because the agent has not observed that episode."""
    with crowd() as env:
        env.seed(0)
        env.reset()
        list(played(env, 5))
        env_is_wrapped = env.env_is_wrapped
        env.env_is_wrapped = lambda *arguments: (kill(env, 1), env_is_wrapped(*arguments))[1]
        saved, _ = episode_state(env)
        assert ["failure_reported" in record for record in saved["records"]] == [False, True, False]


def test_all_episodes_are_replayed_in_parallel(monkeypatch):
    local = DummyVecEnv([made] * 3)
    local.seed(0)
    local.reset()
    list(played(local, 9))
    called = []
    with crowd() as env:
        ask = env.pool.send_calls
        monkeypatch.setattr(env.pool, "send_calls", lambda calls: (called.append(list(calls)), ask(calls)))
        resume_episodes(env, *episode_state(local))
        assert called[0] == [0, 1, 2]
        for one, other in zip(played(local, 30), played(env, 30), strict=True):
            np.testing.assert_equal(one[:3], other[:3])


def test_failure_during_a_replay_raises(tmp_path):
    local = DummyVecEnv([made] * 3)
    local.seed(4)
    local.reset()
    list(played(local, 9))
    saved = episode_state(local)
    assert len(saved[1]["actions.1"]) >= THIRD
    with closing(breaking(tmp_path, "step hangs", **IMPATIENT)) as env:
        with pytest.raises(EpisodeLostError, match="environment 1 did not answer"):
            resume_episodes(env, *saved)
        env.reset()
        assert env.failed_envs() == {}
        assert env.restarts == 1


def test_restart_counts_are_kept_if_the_episodes_are_lost():
    with crowd() as env, crowd() as other:
        env.seed(0)
        env.reset()
        kill(env, 1)
        until_back(env, 1)
        saved, arrays = episode_state(env)
        saved["records"][0]["hash"] = "of another episode"
        with pytest.raises(EpisodeLostError, match="results in a different episode"):
            resume_episodes(other, saved, arrays)
        other.reset()
        assert (other.restarts, other.lost_steps) == (1, env.lost_steps)


def test_episodes_of_restarts_after_resuming_depend_on_the_seed():
    local = DummyVecEnv([made] * 3)
    local.seed(0)
    local.reset()
    saved, episodes = episode_state(local), []
    for _ in range(2):
        with crowd() as env:
            resume_episodes(env, *saved)
            assert env.pool.seeds == [0, 1, 2]
            kill(env, 1)
            episodes.append([observations[1] for observations, *_ in until_back(env, 1)][-2:])
    np.testing.assert_array_equal(*episodes)


@pytest.mark.parametrize("names", [("own", "single"), ("single", "own")])
def test_episodes_of_environments_that_were_created_otherwise_are_lost(names):
    """The T-Maze has a vector environment of its own, which a wrapper class excludes."""
    options = {"own": {}, "single": {"wrapper_class": lambda env: env}}
    saved, other = (make_vec_env("rlxf/TMaze-v0", 2, seed=0, **options[name]) for name in names)
    with closing(saved), closing(other):
        saved.reset()
        other.reset()
        with pytest.raises(EpisodeLostError, match="were created in another way than those of the run"):
            resume_episodes(other, *episode_state(saved))


class OwnNormalize(VecNormalize):
    """Subclass of a user, which may keep further state."""


@pytest.mark.parametrize("kind", [VecNormalize, OwnNormalize])
def test_statistics_of_subclasses_are_restored(kind):
    env, other = (kind(make_vec_env("CartPole-v1", 2, seed=0)) for _ in range(2))
    env.reset()
    for _ in range(5):
        env.step(np.zeros(2, np.int64))
    load_wrapper_state(other, wrapper_state(env))
    assert other.obs_rms.count == env.obs_rms.count > 10
    np.testing.assert_array_equal(other.obs_rms.mean, env.obs_rms.mean)
    np.testing.assert_array_equal(other.returns, env.returns)


def test_episodes_inside_of_a_subclass_of_a_known_wrapper_are_lost():
    env = OwnNormalize(make_vec_env("CartPole-v1", 2, seed=0))
    env.reset()
    with pytest.raises(EpisodeLostError, match="the state that the wrapper OwnNormalize keeps"):
        episode_state(env)
