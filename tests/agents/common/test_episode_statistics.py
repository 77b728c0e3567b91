"""Tests of episode statistics, of their storage in files, and of the seeds of environments that are reset."""

import json

import numpy as np
import pytest

from rlxf.agents.common.episode_statistics import (
    EpisodeStatistics,
    episode_info,
    episode_infos,
    statistics_from_json,
    statistics_to_json,
    unused_seed,
)
from rlxf.training.process_group import ProcessGroup
from rlxf.utils.errors import FaultyEnvironmentError


@pytest.mark.parametrize("other", [5, "first", None, {"number": 5}, {"r": 5.0}])
def test_entries_of_another_meaning_are_no_episode(other):
    assert episode_info({"episode": other, "own": 1}) == {}


def test_an_episode_keeps_its_own_keys():
    episode = {"r": 1.5, "l": 3, "note": "own key"}
    assert episode_info({"episode": episode}) == {"episode": episode}


@pytest.mark.parametrize("success", [True, np.True_, np.array([True]), [1]])
def test_successes_are_numbers(success):
    (value,) = episode_info({"is_success": success}).values()
    assert type(value) is float
    assert value == 1


def test_an_unknown_success_is_left_out():
    assert episode_info({"is_success": None}) == {}


@pytest.mark.parametrize("success", ["no", [[1], [2, 3]]])
def test_other_values_are_no_success(success):
    with pytest.raises(FaultyEnvironmentError, match=r"is_success.* True, False or a number, got "):
        episode_info({"is_success": success})


def test_successes_of_steps_that_are_not_done_are_not_read():
    episode = {"r": 1.0, "l": 2}
    infos = [{"is_success": "running", "episode": episode}, {"is_success": "running"}, {"is_success": True}]
    expected = [{"episode": episode}, {}, {"is_success": 1.0}]
    assert episode_infos(infos, np.array([False, False, True])) == expected
    with pytest.raises(FaultyEnvironmentError, match="got 'running'"):
        episode_infos(infos, np.array([False, True, False]))


def test_recorded_episodes_are_exchanged_without_values_that_files_cannot_hold():
    statistics, steps = EpisodeStatistics(), []
    infos = [{"episode": {"r": np.float32(2), "l": 3, "note": object()}, "is_success": None}, {"episode": 5}]
    statistics.record(infos, np.array([True, True]))
    statistics.exchange(ProcessGroup(), lambda ended, dones: steps.append((ended, dones.tolist())))
    assert steps == [([{"episode": {"r": 2.0, "l": 3.0}}, {}], [True, True])]


def test_stored_statistics_are_restored_without_the_numbers_that_an_environment_lacks():
    infos = [{"r": np.float32(1.5), "l": 3, "t": 0.25, "note": "own key"}, {"r": 2, "l": np.int64(4)}]
    stored = json.loads(json.dumps(statistics_to_json(infos, [True, np.False_])))
    episodes, successes = statistics_from_json(stored, size=5)
    assert list(episodes) == [{"r": 1.5, "l": 3.0, "t": 0.25}, {"r": 2.0, "l": 4.0}]
    assert list(successes) == [1.0, 0.0]
    assert episodes.maxlen == successes.maxlen == 5


def test_missing_statistics_are_stored_as_empty():
    assert statistics_to_json(None, None) == {"episodes": [], "successes": []}


def test_unused_seeds_differ_between_steps_and_seeds():
    seeds = {unused_seed(seed, steps) for seed in range(3) for steps in range(100)}
    assert len(seeds) == 300
    assert unused_seed(1, 2) == unused_seed(1, 2)
