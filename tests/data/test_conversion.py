"""Tests of the conversion of datasets to arrays, against Minari's own reader."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlxf.data import DatasetError, conversion, load_trajectories, observation_encoder
from rlxf.data.conversion import convert
from rlxf.data.dataset_source import open_source
from rlxf.data.running_stats import RunningStats, observation_stats
from tests.datasets import ID, VECTOR, opened, random_episodes, record, record_random

LENGTHS = (4, 1, 9, 2)
BOX = spaces.Box(-2, 2, (2,), np.float64)
OBSERVATIONS = {
    "vector": VECTOR,
    "doubles": spaces.Box(-np.inf, np.inf, (4,), np.float64),
    "choice": spaces.Discrete(5),
    "choices": spaces.MultiDiscrete([2, 3]),
    "bits": spaces.MultiBinary(3),
    "dict": spaces.Dict(
        {"b": VECTOR, "a": spaces.Discrete(3), "in": spaces.Tuple([BOX, spaces.Discrete(2)])}
    ),
    "tuple": spaces.Tuple([VECTOR, spaces.MultiBinary(2)]),
    "small image": spaces.Box(0, 255, (7, 7, 3), np.uint8),
    "gray image": spaces.Box(0, 255, (32, 33), np.uint8),
    "image": spaces.Box(0, 255, (32, 40, 3), np.uint8),
}
ACTIONS = {
    "box": BOX,
    "discrete": spaces.Discrete(4),
    "multidiscrete": spaces.MultiDiscrete([3, 2]),
    "multibinary": spaces.MultiBinary(2),
}


def expected_observations(space, values):
    """Encode step by step with Gymnasium's ``flatten``; images are channels first."""
    if len(space.shape or ()) == 3:
        return np.stack([np.moveaxis(value, -1, 0) for value in values])
    if space.shape == (32, 33):
        return np.stack([value[None] for value in values])
    return np.stack([spaces.flatten(space, value) for value in values]).astype(np.float32)


def check_episodes(trajectories, dataset):
    """Compare with Minari's own reader, episode by episode."""
    space = dataset.observation_space
    for number, episode in enumerate(dataset.iterate_episodes()):
        part = slice(trajectories.offsets[number], trajectories.offsets[number + 1])
        steps = len(episode.rewards)
        rows = unstacked(space, episode.observations, steps)
        np.testing.assert_array_equal(trajectories.observations[part], expected_observations(space, rows))
        np.testing.assert_array_equal(
            trajectories.actions[part], np.asarray(episode.actions).astype(trajectories.actions.dtype)
        )
        np.testing.assert_array_equal(trajectories.rewards[part], episode.rewards.astype(np.float32))
        slow = [sum(episode.rewards[t:]) for t in range(steps)]
        np.testing.assert_allclose(trajectories.return_to_go[part], slow, rtol=1e-6)
        assert trajectories.terminated[number] == episode.terminations[-1]
        assert trajectories.truncated[number] == episode.truncations[-1]


def unstacked(space, values, steps):
    """Return the first ``steps`` values of nested arrays, without the one after the last action."""
    if isinstance(space, spaces.Dict):
        parts = {key: unstacked(part, values[key], steps) for key, part in space.spaces.items()}
        return [{key: parts[key][t] for key in parts} for t in range(steps)]
    if isinstance(space, spaces.Tuple):
        parts = [unstacked(part, value, steps) for part, value in zip(space.spaces, values, strict=True)]
        return list(zip(*parts, strict=True))
    return [values[t] for t in range(steps)]


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations_of_all_spaces_equal_minari(minari_root, name):
    dataset = record_random(LENGTHS, observation_space=OBSERVATIONS[name])
    trajectories = load_trajectories(ID)
    assert trajectories.lengths.tolist() == list(LENGTHS)
    assert trajectories.observations.dtype == observation_encoder(OBSERVATIONS[name]).dtype
    check_episodes(trajectories, dataset)


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_of_all_spaces_equal_minari(minari_root, name):
    dataset = record_random(LENGTHS, action_space=ACTIONS[name])
    check_episodes(load_trajectories(ID), dataset)


def test_conversion_in_pieces_equals_minari(minari_root, monkeypatch):
    monkeypatch.setattr(conversion, "PIECE_BYTES", 3 * 12)  # three observations at a time
    dataset = record_random((10, 3, 1))
    check_episodes(load_trajectories(ID), dataset)


def test_mean_and_standard_deviation_are_over_the_steps(minari_root):
    record_random(LENGTHS)
    trajectories = load_trajectories(ID)
    np.testing.assert_allclose(
        trajectories.observation_mean, trajectories.observations.mean(axis=0), rtol=1e-5
    )
    np.testing.assert_allclose(trajectories.observation_std, trajectories.observations.std(axis=0), rtol=1e-5)


def test_images_for_a_convolution_have_no_mean(minari_root):
    record_random(observation_space=spaces.Box(0, 255, (36, 37, 3), np.uint8), jpeg_encoding=False)
    trajectories = load_trajectories(ID)
    assert trajectories.observation_mean is None
    assert trajectories.observation_std is None


@pytest.mark.parametrize("piece", [40, 2**23], ids=["many pieces", "one piece"])
def test_small_images_are_normalized_as_in_a_dict(minari_root, monkeypatch, piece):
    """The first value is constant; the episodes of both datasets are equal."""
    monkeypatch.setattr(conversion, "PIECE_BYTES", piece)
    space = spaces.Box(0, 255, (3, 4, 5), np.uint8)
    episodes = random_episodes((9, 6), space)
    for episode in episodes:
        episode.observations[:, 0, 0, 0] = 7
    nested = [replace(episode, observations={"view": episode.observations}) for episode in episodes]
    record(episodes, observation_space=space, jpeg_encoding=False)
    inside = record(nested, "test/b-v0", spaces.Dict(view=space), jpeg_encoding=False)
    image, vector = load_trajectories(ID), load_trajectories(inside)
    assert image.observation_mean.shape == image.observation_std.shape == (3, 4, 5)
    normalized, expected = (
        data.normalization()(torch.tensor(np.array(data.observations))) for data in (image, vector)
    )
    torch.testing.assert_close(normalized.flatten(1), expected, rtol=1e-5, atol=1e-5)
    assert image.observation_std[0, 0, 0] == 255


def image_stats(rows):
    """Return the statistics of images (N, 2, 2, 1) with the values (N, 4), and the normalized values."""
    stats = observation_stats(observation_encoder(spaces.Box(0, 255, (2, 2, 1), np.uint8)))
    stats.update(rows.astype(np.float64))
    return stats, (rows - stats.mean) / stats.std


def test_image_values_that_rarely_change_stay_small():
    rows = np.zeros((200_000, 4), np.uint8)
    rows[7, 0] = 255
    rows[:, 1] = 255
    rows[9, 1] = 254
    stats, normalized = image_stats(rows)
    assert np.abs(normalized).max() <= 16
    np.testing.assert_array_equal(stats.std, np.array([255 / 16, 255 / 16, 255, 255], np.float32))


def test_image_values_of_grids_are_divided_by_their_standard_deviation():
    """The values of MiniGrid are at most 10; those of doors are rarely different from 0."""
    rng = np.random.default_rng(0)
    rows = np.stack([rng.integers(0, high, 500) for high in (11, 6, 3, 2)], axis=1)
    rows[:, 3] = np.arange(500) == 3
    stats, normalized = image_stats(rows)
    np.testing.assert_allclose(normalized[:, :3].std(axis=0), 1, rtol=1e-5)
    assert stats.std[3] == 10 / 16


@pytest.mark.parametrize("jpeg", [True, False])
def test_jpeg_images_are_marked_as_lossy(minari_root, jpeg):
    record_random(observation_space=OBSERVATIONS["image"], jpeg_encoding=jpeg)
    assert load_trajectories(ID).lossy_images == jpeg


IN_A_DICT = spaces.Dict(
    {"view": spaces.Box(0, 255, (32, 33, 3), np.uint8), "inner": spaces.Tuple([VECTOR, spaces.Text(6)])}
)


@pytest.mark.filterwarnings("ignore:observation.* is text", "ignore:images of")
@pytest.mark.parametrize("jpeg", [True, False])
def test_images_and_text_in_a_dict_equal_minari(minari_root, jpeg):
    dataset = record_random(LENGTHS, observation_space=IN_A_DICT, jpeg_encoding=jpeg)
    trajectories = load_trajectories(ID)
    assert trajectories.lossy_images == jpeg
    episodes = [episode.observations for episode in dataset.iterate_episodes()]
    vectors = np.concatenate([each["inner"][0][:-1] for each in episodes])
    pixels = np.concatenate([each["view"][:-1].reshape(len(each["view"]) - 1, -1) for each in episodes])
    scaled = pixels.astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(trajectories.observations, np.concatenate([vectors, scaled], axis=1))


def test_small_images_and_vectors_are_not_lossy(minari_root):
    record_random(observation_space=OBSERVATIONS["small image"])
    assert not load_trajectories(ID).lossy_images


def test_rewards_of_shape_n_1_are_accepted(minari_root):
    dataset = record_random((5,))
    rewards = dataset[0].rewards
    with opened(dataset) as file:
        del file["episode_0/rewards"]
        file["episode_0/rewards"] = rewards[:, None]
    np.testing.assert_array_equal(load_trajectories(ID).rewards, rewards.astype(np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["observations", "actions"])
def test_a_non_finite_value_is_reported_with_episode_and_step(minari_root, monkeypatch, part, value):
    monkeypatch.setattr(conversion, "PIECE_BYTES", 2 * 12)  # so that step 5 is not in the first piece
    episodes = random_episodes((3, 8), action_space=BOX)
    getattr(episodes[1], part)[5, 1] = value
    record(episodes, action_space=BOX)
    with pytest.raises(
        DatasetError, match=f"{ID}, episode 1: the {part[:-1]} of step 5 is {value} at index 1"
    ):
        load_trajectories(ID)


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e60])
def test_a_non_finite_reward_is_reported_with_episode_and_step(minari_root, value):
    episodes = random_episodes((3, 8))
    episodes[1].rewards[6] = value
    record(episodes)
    with pytest.raises(
        DatasetError, match=f"{ID}, episode 1: the reward of step 6 is {value}".replace("+", r"\+")
    ):
        load_trajectories(ID)


def test_a_non_finite_return_is_reported_with_episode_and_step(minari_root):
    episodes = random_episodes((3, 8))
    episodes[1].rewards[5:7] = 3e38
    record(episodes)
    with pytest.raises(DatasetError, match=f"{ID}, episode 1: the return-to-go of step 0 is 6e\\+38"):
        load_trajectories(ID)


def test_the_final_observation_is_not_read(minari_root):
    episodes = random_episodes((3,))
    episodes[0].observations[3] = np.nan
    record(episodes)
    assert load_trajectories(ID).steps == 3


def test_an_action_outside_of_the_space_is_reported(minari_root):
    episodes = random_episodes((3, 4))
    episodes[1].actions[2] = 7
    record(episodes)
    with pytest.raises(
        DatasetError, match=r"episode 1: the action of step 2 is \[7\], outside of Discrete\(2\)"
    ):
        load_trajectories(ID)


def test_memory_does_not_grow_with_the_dataset(minari_root, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "PIECE_BYTES", 2**16)
    wide = spaces.Box(-np.inf, np.inf, (256,), np.float32)
    episode = random_episodes((1,), wide)[0]
    long = {
        name: np.repeat(getattr(episode, name), 20_000, axis=0)
        for name in ("actions", "rewards", "terminations", "truncations")
    }
    long["terminations"][:-1] = False
    observations = np.zeros((20_001, 256), np.float32)  # 20 MB
    record([type(episode)(observations=observations, **long)], observation_space=wide)
    del observations
    source = open_source(ID)
    tracemalloc.start()
    convert([source], tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "observations.npy").stat().st_size > 20_000_000
    assert peak < 3_000_000


def stats_of(rows, *cuts):
    moments = RunningStats(rows.shape[1])
    for piece in np.split(rows, cuts):
        moments.update(piece.astype(np.float64))
    return moments


@pytest.mark.parametrize(
    "cuts", [(), (1, 2, 3), (40,), (99,)], ids=["whole", "single rows", "halves", "rest"]
)
def test_stats_of_pieces_equal_those_of_the_whole(cuts):
    rows = np.random.default_rng(0).normal(size=(100, 4)) * [1, 10, 0.01, 1e-3] + [0, 5, -3, 0]
    moments = stats_of(rows, *cuts)
    np.testing.assert_allclose(moments.mean, rows.mean(axis=0), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(moments.std, rows.std(axis=0), rtol=1e-6)


def test_columns_far_from_zero_keep_their_precision():
    rows = 1e6 + np.random.default_rng(0).normal(size=(1000, 1))
    np.testing.assert_allclose(stats_of(rows, 10, 500).std, rows.std(), rtol=1e-6)


def test_columns_of_any_scale_keep_their_standard_deviation():
    """The smallest scale is near the smallest normal number of float32."""
    rows = np.random.default_rng(0).normal(size=(1000, 4)) * [5e-7, 1e-12, 1e-30, 2e-37]
    moments = stats_of(rows.astype(np.float32), 10, 500)
    assert not moments.constant.any()
    np.testing.assert_allclose(moments.std, rows.std(axis=0), rtol=1e-5)


def test_columns_that_vary_by_their_rounding_only_are_constant():
    """Neighboring numbers of float32 differ by at most 1.2e-7 of their size; denormal numbers are 0."""
    constants = np.array([1.0, -3e8, 2e-20, 0], np.float32)
    rows = np.where(np.arange(40)[:, None] % 2, constants, np.nextafter(constants, np.float32(9e9)))
    assert (rows[0] != rows[1]).all()
    moments = stats_of(rows, 3)
    assert moments.constant.all()
    np.testing.assert_array_equal(moments.std, [1, 1, 1, 1])


def test_constant_columns_have_standard_deviation_1():
    rows = np.full((50, 2), 0.1, np.float32)
    moments = stats_of(rows, 7)
    np.testing.assert_array_equal(moments.std, [1, 1])
    np.testing.assert_array_equal(moments.mean.astype(np.float32), rows[0])
