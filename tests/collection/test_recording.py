"""Recorded observations and actions equal those of the environment, for many spaces and failures."""

from contextlib import closing
from itertools import pairwise

import gymnasium
import minari
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence

from rlxf.collection import collect
from rlxf.collection.recording import Recorder
from tests.datasets import stacked
from tests.envs.faulty_envs import breaking
from tests.envs.small_envs import ACTIONS, OBSERVATIONS, any_space_env

ID = "test/spaces-v0"
RECORDABLE = [name for name in OBSERVATIONS if name != "other words"]


@pytest.fixture(autouse=True)
def _root(minari_root):
    return minari_root


def replayed(env, episodes, seed):
    """Yield the observations of a replay of the recorded actions, for each episode."""
    for number, episode in enumerate(episodes):
        observations = [env.reset(seed=seed if number == 0 else None)[0]]
        for action in episode.actions:
            observations.append(env.step(action)[0])
        yield observations


@pytest.mark.parametrize("observations", RECORDABLE)
def test_dataset_has_the_spaces_and_observations_of_the_environment(observations):
    collect(None, any_space_env(observations), ID, episodes=3, seed=5)
    dataset, env = minari.load_dataset(ID), any_space_env(observations)
    assert dataset.observation_space == env.observation_space
    assert dataset.env_spec.kwargs["observations"] == observations
    episodes = list(dataset.iterate_episodes())
    for episode, expected in zip(episodes, replayed(env, episodes, seed=5), strict=True):
        assert is_equal(env.observation_space, episode.observations, expected)


def is_equal(space, recorded, expected):
    """Return whether the recorded arrays equal a list of observations."""
    if isinstance(space, gymnasium.spaces.Dict):
        return all(is_equal(part, recorded[key], [o[key] for o in expected]) for key, part in space.items())
    if isinstance(space, gymnasium.spaces.Tuple):
        parts = enumerate(space)
        return all(is_equal(part, recorded[i], [o[i] for o in expected]) for i, part in parts)
    if isinstance(space, gymnasium.spaces.Text):
        return recorded == expected
    return data_equivalence(np.asarray(recorded), np.asarray(stacked(space, expected)), exact=True)


@pytest.mark.parametrize("actions", ACTIONS)
def test_recorded_actions_are_those_of_the_environment(actions):
    dataset = collect(None, "rlxf-test/AnySpace-v0", ID, episodes=4, n_envs=2)
    assert dataset.total_steps == 16
    dataset = collect(None, any_space_env(actions=actions), "test/actions-v0", episodes=4)
    assert dataset.action_space == ACTIONS[actions]
    for episode in dataset.iterate_episodes():
        assert all(ACTIONS[actions].contains(action) for action in episode.actions)
        np.testing.assert_array_equal(episode.actions.reshape(4, -1).sum(axis=1), episode.rewards)


def test_episodes_of_parallel_environments_are_complete():
    dataset = collect(None, "rlxf-test/AnySpace-v0", ID, episodes=6, n_envs=3)
    assert dataset.env_spec.id == "rlxf-test/AnySpace-v0"
    assert not dataset.env_spec.additional_wrappers
    ends = [(bool(e.terminations[-1]), bool(e.truncations[-1])) for e in dataset.iterate_episodes()]
    assert ends == [(True, False)] * 3 + [(False, True)] * 3
    positions = [episode.observations["body"]["position"] for episode in dataset.iterate_episodes()]
    assert all(len(rows) == 5 for rows in positions)
    assert all((one[-1] != other[0]).any() for one, other in pairwise(positions))


def test_text_that_minari_does_not_support_raises(minari_root):
    with pytest.raises(TypeError, match=r"Minari does not support .*FilterObservation"):
        collect(None, any_space_env("other words"), ID, episodes=2)
    assert list(minari_root.iterdir()) == []


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore:environment:RuntimeWarning")
def test_only_episodes_lost_to_a_failure_are_left_out(tmp_path):
    ended, recorded, marks = [], [], tmp_path / "marks"
    marks.mkdir()
    with closing(breaking(marks, "step raises", "step dies", max_restarts=9)) as env:
        recorder = Recorder(env)
        recorder.reset()
        while env.restarts < 2 or env.failed_envs() or len(ended) < 30:
            *_, infos = recorder.step(np.zeros(3, np.int64))
            ended += [(i, info["episode"]) for i, info in enumerate(infos) if "episode" in info]
            recorded += recorder.pop_finished()
    assert [i for i, _ in ended] == [i for i, _ in recorded]
    for (_, info), (_, episode) in zip(ended, recorded, strict=True):
        assert len(episode.rewards) == info["l"]
        assert np.sum(episode.rewards) == pytest.approx(info["r"], abs=1e-5)
