""""""

import numpy as np
import pytest
from gymnasium import spaces

from rlxf.data import DatasetError, local_folder, local_ids, summarize
from tests.datasets import ID, data_file, record_random


def test_all_local_datasets_are_listed(minari_root):
    assert local_ids() == []
    record_random(dataset_id="test/b-v0")
    data_file(record_random(dataset_id="test/a-v0")).write_bytes(b"")
    assert local_ids() == ["test/a-v0", "test/b-v0"]
    assert local_folder() == minari_root


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
