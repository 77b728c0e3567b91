"""Tests of errors for truncated and altered dataset files."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces

from rlxf.data import DatasetError, load_trajectories
from rlxf.data.cache import cache_root
from tests.datasets import ID, data_file, opened, record_random

pytestmark = pytest.mark.faults


@pytest.fixture
def dataset(minari_root):
    return record_random((30, 1, 5))


def check_refused(match=""):
    with pytest.raises(DatasetError, match=rf"(?s)main_data.hdf5.*truncated or altered.*{match}.*again"):
        load_trajectories(ID)
    assert list(cache_root().glob("*")) == []


def check_refused_in_subprocess():
    """Run `check_refused` in a subprocess, since HDF5 may crash after it has read damaged bytes."""
    code = f"from rlxf.data import load_trajectories; load_trajectories({ID!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"(?s)DatasetError.*main_data.hdf5.*truncated or altered.*again", done.stderr)
    assert list(cache_root().glob("*")) == []


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.999])
def test_a_truncated_file_is_reported(dataset, fraction):
    path = data_file(dataset)
    os.truncate(path, int(path.stat().st_size * fraction))
    check_refused_in_subprocess()


def test_a_file_of_another_format_is_reported(dataset):
    data_file(dataset).write_text("not the data")
    check_refused()


@pytest.mark.parametrize("name", ["rewards", "actions", "observations", "terminations", "truncations"])
def test_a_missing_array_is_reported(dataset, name):
    with opened(dataset) as file:
        del file[f"episode_1/{name}"]
    check_refused()


@pytest.mark.parametrize("name", ["rewards", "actions", "observations", "terminations", "truncations"])
def test_an_array_of_another_length_is_reported(dataset, name):
    with opened(dataset) as file:
        file[f"episode_2/{name}"].resize(3, axis=0)
    check_refused("episode|rows")


def test_a_missing_episode_is_reported(dataset):
    with opened(dataset) as file:
        del file["episode_1"]
    check_refused()


def test_an_additional_episode_is_reported(dataset):
    with opened(dataset) as file:
        file.copy("episode_1", "episode_3")
    check_refused("4 episodes of 36 steps")


def test_a_shortened_episode_is_detected_by_total_steps(dataset):
    with opened(dataset) as file:
        for name, array in file["episode_2"].items():
            array.resize(4 if name == "observations" else 3, axis=0)
    check_refused("total_steps is 5")


def test_an_empty_episode_is_reported(dataset):
    with opened(dataset) as file:
        for name, array in file["episode_2"].items():
            array.resize(1 if name == "observations" else 0, axis=0)
        file["episode_2"].attrs["total_steps"] = 0
    check_refused("no step")


def test_rewards_that_differ_from_rewards_sum_are_reported(dataset):
    with opened(dataset) as file:
        file["episode_0"].attrs["rewards_sum"] = dataset[0].rewards.sum() + 1
    check_refused("its rewards sum to")


def test_rewards_that_match_rewards_sum_are_accepted(dataset):
    with opened(dataset) as file:
        file["episode_0"].attrs["rewards_sum"] = np.float32(dataset[0].rewards.sum())
    assert load_trajectories(ID).steps == 36


def test_a_damaged_image_is_reported(minari_root):
    dataset = record_random((3,), observation_space=spaces.Box(0, 255, (32, 32, 3), np.uint8))
    with opened(dataset) as file:
        frames = file["episode_0/observations"]
        frames[1] = np.zeros(9, np.uint8) if frames.ndim == 1 else 0
    check_refused()


def test_a_changed_byte_in_compressed_data_is_reported(dataset):
    values = np.arange(30)
    with opened(dataset) as file:
        del file["episode_0/rewards"]
        stored = file.create_dataset("episode_0/rewards", data=values, chunks=True, compression="gzip")
        chunk = stored.id.get_chunk_info(0)
    with open(data_file(dataset), "r+b") as handle:
        handle.seek(chunk.byte_offset + chunk.size // 2)
        byte = handle.read(1)
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte[0] ^ 0xFF]))
    check_refused_in_subprocess()
