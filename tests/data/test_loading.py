"""Tests of the loading of trajectories, and of summaries of datasets."""

import numpy as np
import pytest
from gymnasium import spaces

from rlxf.data import DatasetError, load_trajectories, local_folder, local_ids, summarize
from tests.datasets import ID, VECTOR, data_file, random_episodes, record, record_random

SCORES = {"ref_min_score": 9.0, "ref_max_score": 475.0}


def test_a_minari_dataset_and_its_id_give_equal_trajectories(minari_root):
    dataset = record_random()
    np.testing.assert_array_equal(load_trajectories(dataset).rewards, load_trajectories(ID).rewards)


def test_a_filtered_dataset_gives_its_selected_episodes(minari_root):
    dataset = record_random((3, 1, 5, 4))
    filtered = dataset.filter_episodes(lambda episode: len(episode) > 3)
    trajectories, whole = load_trajectories(filtered), load_trajectories(dataset)
    assert trajectories.lengths.tolist() == [5, 4]
    np.testing.assert_array_equal(trajectories.rewards, whole.rewards[4:])
    np.testing.assert_allclose(trajectories.observation_mean, whole.observations[4:].mean(axis=0), rtol=1e-5)


def test_joined_datasets_are_concatenated(minari_root):
    first, second = record_random((3, 2), "test/a-v0"), record_random((4,), "test/b-v0", seed=1)
    both = load_trajectories(["test/a-v0", second])
    parts = [load_trajectories(first), load_trajectories(second)]
    assert both.dataset_ids == ("test/a-v0", "test/b-v0")
    assert both.lengths.tolist() == [3, 2, 4]
    for name in ("observations", "actions", "rewards", "return_to_go", "terminated", "truncated"):
        np.testing.assert_array_equal(
            getattr(both, name), np.concatenate([getattr(part, name) for part in parts])
        )
    np.testing.assert_allclose(both.observation_mean, both.observations.mean(axis=0), rtol=1e-5)


def test_a_dataset_can_be_joined_with_itself(minari_root):
    record_random((3, 2))
    assert load_trajectories([ID, ID]).lengths.tolist() == [3, 2, 3, 2]


@pytest.mark.parametrize(
    "other",
    [{"observation_space": spaces.Box(-1, 1, (4,))}, {"action_space": spaces.Discrete(3)}],
    ids=["observations", "actions"],
)
def test_datasets_of_different_spaces_cannot_be_joined(minari_root, other):
    record_random(dataset_id="test/a-v0")
    record_random(dataset_id="test/b-v0", **other)
    with pytest.raises(DatasetError, match=r"test/a-v0 and test/b-v0 cannot be joined.*expected"):
        load_trajectories(["test/a-v0", "test/b-v0"])


def test_an_empty_list_of_datasets_is_refused(minari_root):
    with pytest.raises(DatasetError, match="give at least one"):
        load_trajectories([])


def record_cartpole(dataset_id, **options):
    cartpole = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    return record_random(dataset_id=dataset_id, observation_space=cartpole, **options)


def test_metadata_is_kept(minari_root):
    record_cartpole(ID, env="CartPole-v1", eval_env="Acrobot-v1", description="mixed", **SCORES)
    trajectories = load_trajectories(ID)
    assert trajectories.env_spec.id == "CartPole-v1"
    assert trajectories.eval_env_spec.id == "Acrobot-v1"
    assert trajectories.metadata[0]["description"] == "mixed"
    assert trajectories.observation_space.shape == (4,)
    assert trajectories.reference_scores.maximum == 475


def test_the_default_evaluation_environment_is_that_of_the_data(minari_root):
    record_cartpole(ID, env="CartPole-v1")
    assert load_trajectories(ID).eval_env_spec.id == "CartPole-v1"


def test_environment_and_reference_scores_may_be_missing(minari_root):
    record_random()
    trajectories = load_trajectories(ID)
    assert (trajectories.env_spec, trajectories.eval_env_spec, trajectories.reference_scores) == (
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("second", "env", "scored"),
    [
        ({"env": "CartPole-v1", **SCORES}, "CartPole-v1", True),
        ({"env": "CartPole-v1", **SCORES, "ref_max_score": 200.0}, "CartPole-v1", False),
        ({"env": "Acrobot-v1", **SCORES}, None, True),
        ({}, None, False),
    ],
    ids=["agree", "other scores", "other environment", "neither"],
)
def test_joined_datasets_keep_common_metadata(minari_root, second, env, scored):
    record_cartpole("test/a-v0", env="CartPole-v1", **SCORES)
    record_cartpole("test/b-v0", **second)
    both = load_trajectories(["test/a-v0", "test/b-v0"])
    assert (both.env_spec and both.env_spec.id) == env
    assert (both.reference_scores is not None) == scored


def test_returns_are_the_sums_of_the_rewards(minari_root):
    dataset = record_random((3, 1, 5))
    returns = [episode.rewards.sum() for episode in dataset]
    np.testing.assert_allclose(load_trajectories(ID).returns, returns, rtol=1e-6)


def test_arrays_are_read_only(minari_root):
    record_random()
    with pytest.raises(ValueError, match="read-only"):
        load_trajectories(ID).observations[0] = 0


def test_normalization_standardizes_the_dataset(minari_root):
    import torch

    record_random((50,), observation_space=VECTOR)
    trajectories = load_trajectories(ID)
    scaled = trajectories.normalization()(torch.tensor(np.array(trajectories.observations)))
    torch.testing.assert_close(scaled.std(0, correction=0), torch.ones(3), atol=1e-4, rtol=0)


def test_images_with_different_channel_axes_are_joined(minari_root):
    last, first = (spaces.Box(0, 255, shape, np.uint8) for shape in ((34, 36, 3), (3, 34, 36)))
    one = record_random((2,), "test/last-v0", observation_space=last)
    other = record_random((3,), "test/first-v0", observation_space=first)
    joined = load_trajectories([one, other])
    recorded = [next(iter(each.iterate_episodes())).observations for each in (one, other)]
    np.testing.assert_array_equal(joined.observations[:2], np.moveaxis(recorded[0], -1, 1)[:2])
    np.testing.assert_array_equal(joined.observations[2:], recorded[1][:3])


IMAGES = spaces.Box(0, 255, (34, 36, 3), np.uint8)


@pytest.mark.parametrize("name", ["lossy", "exact"])
def test_jpeg_images_are_warned_of_once(minari_root, name, recwarn):
    episodes = random_episodes((2, 3), IMAGES)
    record(episodes, f"test/{name}-v0", IMAGES, jpeg_encoding=name == "lossy")
    recwarn.clear()
    loaded = load_trajectories([f"test/{name}-v0"] * 2)
    first = np.moveaxis(episodes[0].observations[:2], -1, 1)
    changed = bool((loaded.observations[:2] != first).any())
    messages = [str(each.message) for each in recwarn if "JPEG" in str(each.message)]
    assert changed == loaded.lossy_images == bool(messages) == (name == "lossy")
    assert len(messages) <= 1
    assert all("images of test/lossy-v0 were stored as JPEG" in each for each in messages)


def test_all_local_datasets_are_listed(minari_root):
    assert local_ids() == []
    record_random(dataset_id="test/b-v0")
    data_file(record_random(dataset_id="test/a-v0")).write_bytes(b"")
    record_random(dataset_id="test/b-v10")
    record_random(dataset_id="test/b-v2")
    for other in ("t/malformed-v0", ".hidden/c-v0", "test/empty-v0"):
        (minari_root / other / ("" if "empty" in other else "data")).mkdir(parents=True)
    expected = ["test/a-v0", "test/b-v0", "test/b-v2", "test/b-v10", "t/malformed-v0"]
    assert local_ids() == expected
    assert local_folder() == minari_root


def test_links_to_folders_above_are_not_followed(minari_root):
    record_random(dataset_id="test/a-v0")
    for name in ("x", "y", "test/z"):
        (minari_root / name).symlink_to(minari_root)
    (minari_root.parent / "elsewhere").mkdir()
    (minari_root / "test").rename(minari_root.parent / "elsewhere/test")
    (minari_root / "moved").symlink_to(minari_root.parent / "elsewhere")
    assert local_ids() == ["moved/test/a-v0"]


def test_summaries_equal_minari(minari_root):
    dataset = record_random((3, 1, 5))
    summary = summarize(ID)
    assert (summary.id, summary.environment) == (ID, None)
    assert summary.lengths.tolist() == [len(episode) for episode in dataset]
    np.testing.assert_allclose(summary.returns, [episode.rewards.sum() for episode in dataset])
    assert not summary.lossy_images
    assert summary.size == data_file(dataset).stat().st_size


@pytest.mark.parametrize("jpeg", [True, False])
def test_summaries_report_jpeg_images(minari_root, jpeg):
    record_random(observation_space=spaces.Box(0, 255, (36, 40, 3), np.uint8), jpeg_encoding=jpeg)
    assert summarize(ID).lossy_images == jpeg


def test_a_summary_does_not_convert_the_dataset(minari_root, tmp_path):
    record_random()
    summarize(ID)
    assert not (tmp_path / "cache").exists()


@pytest.mark.faults
def test_a_damaged_dataset_is_reported(minari_root):
    data_file(record_random()).write_bytes(b"")
    with pytest.raises(DatasetError, match=r"main_data\.hdf5"):
        summarize(ID)
