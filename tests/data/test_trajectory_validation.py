"""Tests of the validation of trajectories that were not loaded from a dataset."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from gymnasium import spaces

from rlxf.data import DatasetError, as_trajectories, load_trajectories
from tests.datasets import ID, record_random

WRONG_ARRAYS = {
    "float64 observations": (
        {"observations": np.zeros((24, 2))},
        r"observations of .* must be float32 of shape \(24, 2\), .*; convert it with observations.astype",
    ),
    "lost observations": (
        {"observations": np.zeros((23, 2), np.float32)},
        r"observations of .* shape \(24, 2\), .* got float32 of shape \(23, 2\); correct its shape",
    ),
    "list": ({"rewards": [1.0] * 24}, "rewards of the trajectories must be a NumPy array, got list"),
    "int32 actions": (
        {"actions": np.zeros(24, np.int32)},
        "actions of .* must be int64 of shape .* got int32",
    ),
    "actions above": (
        {"actions": np.arange(24) + 80},
        "action of step 19 .*counted from 0, is 99, outside of",
    ),
    "actions below": (
        {"actions": np.arange(24) - 1},
        r"action of step 0 .* is -1, outside of Discrete\(99\)",
    ),
    "short offsets": (
        {"offsets": np.array([0, 7, 8, 12, 20])},
        r"offsets .* number of steps, 24, .* 12 20\]",
    ),
    "no episode": ({"offsets": np.array([0, 7, 7, 12, 24])}, "offsets .* at least one step between"),
    "NaN": (
        {"observations": np.where(np.eye(24, 2) > 0, np.nan, 0).astype(np.float32)},
        "the observation of step 0 of the trajectories is nan; correct the observations",
    ),
    "infinite reward": (
        {"rewards": np.full(24, -np.inf, np.float32)},
        "the reward of step 0 .* is -inf; correct the rewards",
    ),
    "std 0": (
        {"observation_std": np.array([1, 0], np.float32)},
        "observation_std .* must be finite and above 0, got 0.0 for feature 1",
    ),
    "NaN mean": (
        {"observation_mean": np.array([np.nan, 0], np.float32)},
        "observation_mean .* must be finite",
    ),
    "std of other features": (
        {"observation_std": np.ones(3, np.float32)},
        r"observation_std .* shape \(2,\)",
    ),
    "endings": ({"terminated": np.ones(24, bool)}, r"terminated .* must be bool of shape \(4,\)"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG_ARRAYS.values(), ids=WRONG_ARRAYS)
def test_wrong_arrays_of_trajectories_are_named(data, changes, message):
    with pytest.raises(DatasetError, match=message):
        as_trajectories(replace(data, **changes))


def test_actions_outside_of_their_box_are_named(data):
    box = {"action_space": spaces.Box(-1, 1, (2,)), "actions": np.zeros((24, 2), np.float32)}
    assert as_trajectories(replace(data, **box))
    box["actions"][3, 1] = 1.1
    with pytest.raises(DatasetError, match=r"the action of step 3 of the trajectories is \[0.0, 1.1"):
        as_trajectories(replace(data, **box))


def test_loaded_trajectories_are_not_validated_again(minari_root, monkeypatch):
    record_random()
    loaded = load_trajectories(ID)
    monkeypatch.setattr("rlxf.data.loading.check_trajectories", lambda data: 1 / 0)
    assert as_trajectories(loaded) is loaded
    with pytest.raises(ZeroDivisionError):
        as_trajectories(replace(loaded))


def test_writable_copies_of_loaded_trajectories_are_validated(minari_root):
    record_random()
    data = copy.deepcopy(load_trajectories(ID))
    assert not data.loaded
    data.observations[5, 0] = np.nan
    with pytest.raises(DatasetError, match="the observation of step 5 of the trajectories is nan"):
        as_trajectories(data)
