"""Tests of the storage of episode statistics in files, and of the seeds of environments that are reset."""

import json

import numpy as np

from rlxf.agents.common.episode_statistics import statistics_from_json, statistics_to_json, unused_seed


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
