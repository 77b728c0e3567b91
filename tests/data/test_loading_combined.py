"""Tests of datasets that Minari combines, splits or filters, against Minari's own reader."""

import gymnasium
import minari
import numpy as np
import pytest
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer

from rlxf.data import load_trajectories, summarize
from rlxf.data.cache import cache_folder
from rlxf.data.dataset_source import open_source
from tests.datasets import ID, opened, record, record_random

ARRAYS = ("observations", "actions", "rewards", "return_to_go", "terminated", "truncated")
HOPPER = spaces.Box(-np.inf, np.inf, (11,), np.float32), spaces.Box(-1, 1, (3,), np.float32)


@pytest.fixture
def parts(minari_root):
    """Return two datasets with equal spaces."""
    return record_random((3, 2), "test/a-v0"), record_random((4, 1, 2), "test/b-v0", seed=1)


def assert_same(actual, expected):
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), err_msg=name)
    np.testing.assert_array_equal(actual.offsets, expected.offsets)
    np.testing.assert_allclose(actual.observation_mean, expected.observation_mean, rtol=1e-5)


def read_with_minari(dataset):
    """Read observations, actions and returns with Minari, episode by episode."""
    episodes = list(dataset)
    return (
        np.concatenate([episode.observations[:-1] for episode in episodes]),
        np.concatenate([episode.actions for episode in episodes]),
        [episode.rewards.sum() for episode in episodes],
    )


def check_against_minari(dataset):
    loaded = load_trajectories(dataset)
    observations, actions, returns = read_with_minari(dataset)
    np.testing.assert_array_equal(loaded.observations, observations)
    np.testing.assert_array_equal(loaded.actions, actions)
    np.testing.assert_allclose(loaded.returns, returns, rtol=1e-6)
    return loaded


def folder(*datasets):
    return cache_folder([open_source(each) for each in datasets])


# Combined


def test_a_combined_dataset_concatenates_its_parts(parts):
    combined = minari.combine_datasets(list(parts), "test/both-v0")
    loaded = check_against_minari(combined)
    assert_same(loaded, load_trajectories(list(parts)))
    assert_same(load_trajectories("test/both-v0"), loaded)
    assert loaded.lengths.tolist() == [3, 2, 4, 1, 2]
    assert loaded.dataset_ids == ("test/both-v0",)
    assert loaded.metadata[0]["combined_datasets"] == ["test/a-v0", "test/b-v0"]
    assert summarize("test/both-v0").lengths.tolist() == [3, 2, 4, 1, 2]


def test_combined_datasets_can_be_combined_again(parts):
    once = minari.combine_datasets(list(parts), "test/once-v0")
    twice = minari.combine_datasets([once, parts[0]], "test/twice-v0")
    assert_same(load_trajectories(twice), load_trajectories(["test/once-v0", "test/a-v0"]))


def test_combined_and_joined_datasets_have_separate_caches(parts):
    combined = minari.combine_datasets(list(parts), "test/both-v0")
    folders = [folder(*each) for each in ([combined], [parts[0]], [parts[1]], parts, parts[::-1])]
    assert len(set(folders)) == len(folders)


def test_a_dataset_combined_again_under_the_same_id_is_converted_again(parts):
    """The other parts have the same number of steps."""
    other = record_random((3, 2), "test/c-v0", seed=2)
    load_trajectories(minari.combine_datasets([parts[0], parts[1]], "test/both-v0"))
    minari.delete_dataset("test/both-v0")
    again = minari.combine_datasets([other, parts[1]], "test/both-v0")
    assert_same(load_trajectories("test/both-v0"), load_trajectories([other, parts[1]]))
    check_against_minari(again)


def test_infos_in_only_one_part_are_allowed(minari_root):
    bare = record_random((3,), "test/bare-v0")
    episode = next(iter(record_random((4,), "test/plain-v0", seed=1)))
    buffer = EpisodeBuffer(
        observations=episode.observations,
        actions=episode.actions,
        rewards=episode.rewards,
        terminations=episode.terminations,
        truncations=episode.truncations,
        infos={"depth": np.arange(5), "more": {"deep": np.ones(5)}},
    )
    with_infos = record([buffer], "test/infos-v0")
    assert next(iter(with_infos)).infos
    assert_same(load_trajectories(with_infos), load_trajectories("test/plain-v0"))
    combined = minari.combine_datasets([bare, with_infos], "test/both-v0")
    assert_same(load_trajectories(combined), load_trajectories(["test/bare-v0", "test/plain-v0"]))


def hopper(dataset_id, seed, steps=1000):
    spec = gymnasium.spec("Hopper-v5")
    spec.max_episode_steps = steps
    return record_random(
        (2, 3), dataset_id, *HOPPER, seed=seed, env=spec, ref_min_score=0.0, ref_max_score=50.0
    )


def test_combined_datasets_use_the_table_of_reference_scores(minari_root):
    pytest.importorskip("mujoco")
    combined = minari.combine_datasets([hopper("test/a-v0", 0), hopper("test/b-v0", 1)], "test/both-v0")
    assert load_trajectories("test/a-v0").reference_scores.maximum == 50
    loaded = load_trajectories(combined)
    assert "ref_max_score" not in loaded.metadata[0]
    assert loaded.reference_scores.maximum == pytest.approx(3234.3)
    assert "table" in loaded.reference_scores.source


def test_a_combined_dataset_has_the_longest_time_limit_of_its_parts(minari_root):
    pytest.importorskip("mujoco")
    parts = [hopper("test/a-v0", 0, 300), hopper("test/b-v0", 1, 1000)]
    assert (
        load_trajectories(minari.combine_datasets(parts, "test/both-v0")).env_spec.max_episode_steps == 1000
    )


def test_combining_exact_images_warns_of_jpeg(minari_root):
    images = spaces.Box(0, 255, (34, 36, 3), np.uint8)
    parts = [record_random((2,), f"test/{name}-v0", images, jpeg_encoding=False) for name in "ab"]
    assert not load_trajectories(parts).lossy_images
    combined = minari.combine_datasets(parts, "test/both-v0")
    with pytest.warns(UserWarning, match="images of test/both-v0 were stored as JPEG"):
        assert load_trajectories(combined).lossy_images


# Split and filtered


def test_split_datasets_partition_the_episodes(minari_root):
    dataset = record_random((3, 1, 5, 4, 2))
    halves = minari.split_dataset(dataset, [2, 3], seed=3)
    loaded = [check_against_minari(half) for half in halves]
    assert [each.episodes for each in loaded] == [2, 3]
    assert sorted(np.concatenate([each.lengths for each in loaded])) == [1, 2, 3, 4, 5]
    assert {each.dataset_ids for each in loaded} == {(ID,)}
    assert len({folder(each) for each in (dataset, *halves)}) == 3


def test_the_order_of_episodes_is_kept_and_has_a_separate_cache(minari_root):
    dataset = record_random((3, 1, 5))
    descending = minari.MinariDataset(dataset.storage, np.array([2, 0]))
    ascending = minari.MinariDataset(dataset.storage, np.array([0, 2]))
    assert check_against_minari(descending).lengths.tolist() == [5, 3]
    assert check_against_minari(ascending).lengths.tolist() == [3, 5]
    assert folder(descending) != folder(ascending)


def test_filtered_and_split_datasets_can_be_joined(minari_root):
    dataset = record_random((3, 1, 5, 4, 2))
    first, second = minari.split_dataset(dataset, [3, 2], seed=0)
    long = first.filter_episodes(lambda episode: len(episode) > 1)
    check_against_minari(long)
    joined = load_trajectories([long, second])
    lengths = [len(episode) for each in (long, second) for episode in each]
    assert joined.lengths.tolist() == lengths


def test_joining_keeps_a_filter_that_combining_ignores(parts):
    """Minari copies whole files, so the combined dataset contains all episodes."""
    long = parts[0].filter_episodes(lambda episode: len(episode) > 2)
    combined = minari.combine_datasets([long, parts[1]], "test/both-v0")
    assert check_against_minari(combined).lengths.tolist() == [3, 2, 4, 1, 2]
    assert load_trajectories([long, parts[1]]).lengths.tolist() == [3, 4, 1, 2]


def test_a_split_dataset_does_not_read_damaged_episodes_of_others(minari_root):
    dataset = record_random((3, 1, 5))
    first, rest = (minari.MinariDataset(dataset.storage, np.array(each)) for each in ([0], [1, 2]))
    with opened(dataset) as file:
        del file["episode_2/rewards"]
    assert load_trajectories(first).lengths.tolist() == [3]
    with pytest.raises(ValueError, match="episode 2: the file is truncated or altered"):
        load_trajectories(rest)
