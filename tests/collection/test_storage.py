"""Allocation of disk space before HDF5 writes."""

import re

import numpy as np
import pytest
from gymnasium import spaces

from rlxf.collection import storage
from tests.datasets import VECTOR, data_file, random_episodes, record

IMAGE = spaces.Box(0, 255, (24, 24, 3), np.uint8)
SPACES = {
    "vector": VECTOR,
    "wide vector": spaces.Box(-1, 1, (400,), np.float32),
    "image": IMAGE,
    "nested": spaces.Dict({"a": VECTOR, "b": spaces.Tuple([VECTOR, spaces.Discrete(3)])}),
}


@pytest.fixture
def allocated(monkeypatch):
    """Sizes in bytes that were allocated."""
    sizes = []
    monkeypatch.setattr(storage.os, "posix_fallocate", lambda handle, start, bytes: sizes.append(bytes))
    return sizes


@pytest.mark.parametrize("lengths", [(1,), (1,) * 64, (700, 3), (70,) * 30], ids=str)
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_hdf5_needs_at_most_the_allocated_space(space, lengths, allocated, minari_root, tmp_path):
    episodes = random_episodes(lengths, space)
    storage.check_space(tmp_path, episodes)
    written = data_file(record(episodes, observation_space=space, jpeg_encoding=False)).stat().st_size
    assert written <= allocated[0]


def test_allocated_file_is_removed(tmp_path):
    storage.check_space(tmp_path, random_episodes((3, 1)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["", ".", "a/b", 1, "a\0b"])
def test_keys_that_hdf5_cannot_store_are_refused(key):
    space = spaces.Dict({"nested": spaces.Tuple([spaces.Dict({key: VECTOR})])})
    with pytest.raises(TypeError, match=rf"cannot store an observation with the key {re.escape(repr(key))} "):
        storage.storage_space(space)
