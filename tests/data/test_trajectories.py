"""Tests of returns-to-go and normalization of trajectories."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlxf.data import return_to_go, running_stats
from rlxf.data.trajectories import ScaleImages, Standardize


def test_standardized_vectors_have_mean_0_and_standard_deviation_1():
    data = np.random.default_rng(0).normal(size=(500, 3)) * [1, 10, 0.1] + [0, -4, 7]
    layer = Standardize(data.mean(axis=0, dtype=np.float32), data.std(axis=0, dtype=np.float32))
    scaled = layer(torch.tensor(data, dtype=torch.float32))
    torch.testing.assert_close(scaled.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(scaled.std(0, correction=0), torch.ones(3), atol=1e-4, rtol=0)


def test_the_representation_is_short(data):
    assert repr(data) == "Trajectories(no dataset id: 4 episodes, 24 steps)"
    assert repr(replace(data, dataset_ids=("a/b-v0",))) == "Trajectories(a/b-v0: 4 episodes, 24 steps)"
    assert repr(replace(data, dataset_ids=("a/b-v0",) * 99)).startswith("Trajectories(99 datasets: ")


def test_other_rewards_have_their_own_returns(data):
    rewards = np.random.default_rng(1).normal(size=data.steps)
    changed = data.with_rewards(rewards)
    parts = np.split(rewards, data.offsets[1:-1])
    np.testing.assert_allclose(changed.return_to_go, np.concatenate([*map(return_to_go, parts)]), rtol=1e-6)
    np.testing.assert_array_equal(changed.rewards, rewards.astype(np.float32))
    with pytest.raises(ValueError, match=r"rewards must have the shape \(24,\), got \(3,\)"):
        data.with_rewards([1, 2, 3])


def test_only_last_steps_that_are_not_terminated_lack_a_next_observation(data):
    """The ends of episodes need not be known: the third one is neither terminated nor truncated."""
    flags = np.array([[True, False, False, True], [False, True, False, True]])
    complete = replace(data, terminated=flags[0], truncated=flags[1]).complete_transitions
    assert np.flatnonzero(~complete).tolist() == (data.offsets[[2, 3]] - 1).tolist()


def test_of_episodes_with_equal_returns_the_earlier_are_the_best(data):
    assert data.with_rewards(np.zeros(data.steps)).best_episodes(0.5).tolist() == [0, 1]


def test_returns_of_negative_zeros_are_zero(data):
    assert not np.signbit(data.with_rewards(np.full(data.steps, -0.0)).returns).any()


@pytest.mark.parametrize("piece", [1, 2**20])
def test_other_observations_have_their_own_moments(data, piece, monkeypatch):
    monkeypatch.setattr(running_stats, "PIECE_NUMBERS", piece)
    observations = np.random.default_rng(1).normal(size=(data.steps, 2)) * 100 + [0, 5000]
    observations[:, 0] = 7
    changed = data.with_observations(observations)
    assert changed.observations.dtype == np.float32
    np.testing.assert_allclose(changed.observation_mean, observations.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(changed.observation_std, [1, observations[:, 1].std()], rtol=1e-5)
    with pytest.raises(ValueError, match=r"float32 of shape \(24, 2\), .* got float64 of shape \(24, 1\)"):
        data.with_observations(observations[:, :1])


def test_other_images_are_bytes(data):
    images = replace(data, observation_space=spaces.Box(0, 255, (3, 40, 40), np.uint8))
    rows = np.zeros((24, 3, 40, 40), np.uint8)
    assert images.with_observations(rows).observation_mean is None
    for dtype in ("float32", "uint16", "int8"):
        with pytest.raises(ValueError, match=rf"observations must be uint8 of shape .* got {dtype} of shape"):
            images.with_observations(rows.astype(dtype))


def test_a_fingerprint_depends_on_each_array(data):
    own = data.fingerprint()
    assert own == replace(data).fingerprint()
    for name in ("observations", "actions", "rewards", "return_to_go", "terminated", "truncated"):
        array = np.array(getattr(data, name))
        array[0] = ~array[0] if array.dtype == bool else array[0] + 1
        assert replace(data, **{name: array}).fingerprint() != own


def test_mean_and_std_are_buffers():
    layer = Standardize([1.0, 2.0], [3.0, 4.0])
    other = Standardize([0.0, 0.0], [1.0, 1.0])
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(torch.ones(2)), layer(torch.ones(2)))
    assert not list(layer.parameters())


def test_images_are_scaled_to_0_and_1():
    scaled = ScaleImages()(torch.tensor([0, 51, 255], dtype=torch.uint8))
    torch.testing.assert_close(scaled, torch.tensor([0.0, 0.2, 1.0]))


@pytest.mark.parametrize("pixels", [5, 36])
def test_images_without_statistics_are_divided_by_255(data, pixels):
    space = spaces.Box(0, 255, (3, pixels, pixels), np.uint8)
    image = torch.from_numpy(space.sample())
    layer = replace(
        data, observation_space=space, observation_mean=None, observation_std=None
    ).normalization()
    assert torch.equal(layer(image[None])[0], image / 255)


@pytest.mark.parametrize("length", [1, 2, 50])
def test_return_to_go_is_the_sum_of_future_rewards(length):
    rewards = np.random.default_rng(0).normal(size=length)
    slow = [sum(rewards[t:]) for t in range(length)]
    np.testing.assert_allclose(return_to_go(rewards), slow, rtol=1e-12)


def test_sums_have_float64_precision():
    rewards = np.array([1e8] + [1.0] * 1000, np.float32)
    assert return_to_go(rewards)[0] == 1e8 + 1000
