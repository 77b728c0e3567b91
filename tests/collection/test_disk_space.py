"""The room that is asked for before HDF5 writes."""

import numpy as np
import pytest
from gymnasium import spaces

from rlxf.collection import disk_space
from tests.datasets import VECTOR, data_file, random_episodes, record

IMAGE = spaces.Box(0, 255, (24, 24, 3), np.uint8)
SPACES = {
    "vector": VECTOR,
    "wide vector": spaces.Box(-1, 1, (400,), np.float32),
    "image": IMAGE,
    "nested": spaces.Dict({"a": VECTOR, "b": spaces.Tuple([VECTOR, spaces.Discrete(3)])}),
}


@pytest.fixture
def asked(monkeypatch):
    """Bytes that were asked for."""
    seen = []
    monkeypatch.setattr(disk_space.os, "posix_fallocate", lambda handle, start, bytes: seen.append(bytes))
    return seen


@pytest.mark.parametrize("lengths", [(1,), (1,) * 64, (700, 3), (70,) * 30], ids=str)
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_hdf5_needs_no_more_than_was_asked_for(space, lengths, asked, minari_root, tmp_path):
    episodes = random_episodes(lengths, space)
    disk_space.check_space(tmp_path, episodes)
    written = data_file(record(episodes, observation_space=space, jpeg_encoding=False)).stat().st_size
    assert written <= asked[0]


def test_nothing_is_left_of_what_was_asked_for(tmp_path):
    disk_space.check_space(tmp_path, random_episodes((3, 1)))
    assert list(tmp_path.iterdir()) == []
