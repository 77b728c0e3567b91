"""Tests of groups of HDF5 files: members are checked and opened once."""

from collections import Counter

import h5py
import numpy as np
import pytest

from rlxf.data import hdf5_nodes, load_trajectories
from rlxf.data.hdf5_nodes import LocalGroup, read_rows
from tests.datasets import ID, record_random


@pytest.fixture
def file(tmp_path):
    """Return an HDF5 file with an array, a nested one and a soft link."""
    with h5py.File(tmp_path / "nodes.hdf5", "w") as made:
        made["a"] = np.arange(3)
        made["in/b"] = np.arange(4)
        made["link"] = h5py.SoftLink("/a")
        made["in"].attrs["total"] = 7
        yield made


def test_members_are_opened_once(file):
    group = LocalGroup(file)
    assert group["a"][:].tolist() == [0, 1, 2]
    assert group["in/b"] is group["in"]["b"]
    assert [len(array) for array in group.arrays("in")] == [4]
    assert next(group.arrays("a")) is group["a"]


def test_attributes_are_numbers(file):
    assert LocalGroup(file)["in"].number("total", 1) == 7
    assert LocalGroup(file)["in"].number("other", 1) == 1


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("c", KeyError, "c is missing"),
        ("in/c", KeyError, "c is missing"),
        ("link", ValueError, "link is a link .SoftLink., which is not followed"),
    ],
)
def test_missing_members_and_links_are_refused(file, name, error, message):
    group = LocalGroup(file)
    for _ in range(2):
        with pytest.raises(error, match=message):
            group[name]


def test_a_conversion_opens_each_node_twice(minari_root, monkeypatch):
    """Once to compare lengths, shapes and dtypes before arrays are written, and once to read the episode."""
    record_random((3, 2))
    names = []
    opened = hdf5_nodes._open
    monkeypatch.setattr(
        hdf5_nodes, "_open", lambda group, name: names.append((group.name, name)) or opened(group, name)
    )
    load_trajectories(ID)
    counts = Counter(names)
    assert len(counts) == 2 + 2 * 5
    assert set(counts.values()) == {2}


@pytest.mark.parametrize("dtype", ["?", "u1", "<i8", ">i4", "<f2", "<f4", ">f8"])
@pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 3), (7, 2, 4, 3), (7, 0)])
@pytest.mark.parametrize("storage", [{}, {"chunks": True, "compression": "gzip"}])
def test_rows_are_those_of_h5py(file, dtype, shape, storage):
    values = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    array = file.create_dataset("array", data=values, **(storage if values.size else {}))
    for start, stop in [(0, 7), (0, 1), (2, 5), (6, 7), (3, 3)]:
        rows, expected = read_rows(array, start, stop), array[start:stop]
        assert (rows.dtype, rows.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(rows, expected)


@pytest.mark.parametrize("value", [np.int64(5), np.float32(0.25), np.uint8(255), np.True_])
def test_number_is_the_attribute(file, value):
    file.attrs["value"] = value
    number = LocalGroup(file).number("value", 0)
    assert (number, number.dtype) == (value, value.dtype)
