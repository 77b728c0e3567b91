"""Tests of the lookup, the download and the validation of datasets."""

import errno
import fcntl
import json
import os
import shutil
import socket

import h5py
import minari
import numpy as np
import pytest
from huggingface_hub import constants
from minari.storage.datasets_root_dir import get_dataset_path

from rlxf.data import DatasetError, load_trajectories
from rlxf.data.dataset_source import open_source
from tests.datasets import ID, data_file, record_random


def test_an_unknown_dataset_error_lists_similar_names(minari_root):
    record_random()
    with pytest.raises(
        DatasetError,
        match=r"smal-v0' is not in .*minari \(similar names: test/small-v0\).*download=True \(--download\)",
    ):
        load_trajectories("test/smal-v0")


@pytest.mark.parametrize("wrong", ["no version", "hopper/medium", "", "../no/file"])
def test_invalid_ids_are_refused(minari_root, wrong):
    with pytest.raises(DatasetError, match=f"'{wrong}' is not a Minari id; write namespace/name-v0"):
        load_trajectories(wrong)


@pytest.mark.parametrize("name", ["steps.npz", "folder/log.csv", "steps"])
def test_files_are_refused_with_the_guide(minari_root, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps").touch()
    with pytest.raises(DatasetError, match=f"'{name}' is the name of a file.*record-and-convert-datasets.md"):
        load_trajectories(name)


def test_a_file_with_the_name_of_a_dataset_does_not_matter(minari_root, tmp_path, monkeypatch):
    record_random((3,), dataset_id="small-v0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small-v0").touch()
    assert load_trajectories("small-v0").steps == 3


def test_the_message_for_another_type_does_not_contain_its_values(minari_root):
    with pytest.raises(TypeError) as refused:
        load_trajectories({"observations": np.full((9, 3), 0.125)})
    assert "got dict" in str(refused.value)
    assert "0.125" not in str(refused.value)


def test_other_types_are_refused(minari_root):
    with pytest.raises(TypeError, match="a Minari id, a MinariDataset, or a list of these, got int; convert"):
        load_trajectories(3)


def test_an_empty_dataset_is_refused(minari_root):
    dataset = record_random().filter_episodes(lambda episode: False)
    with pytest.raises(DatasetError, match=f"{ID} has no episodes"):
        load_trajectories(dataset)


def test_a_dataset_recorded_without_episodes_is_refused(minari_root):
    record_random(())
    with pytest.raises(DatasetError, match=f"{ID} has no episodes"):
        load_trajectories(ID)


def edit_metadata(dataset, old, new):
    path = data_file(dataset).with_name("metadata.json")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_formats_other_than_hdf5_are_refused(minari_root):
    dataset = record_random()
    edit_metadata(dataset, '"hdf5"', '"arrow"')
    with pytest.raises(DatasetError, match=r"stored as 'arrow'; only hdf5 is supported"):
        open_source(dataset)


@pytest.mark.faults
def test_invalid_metadata_is_reported(minari_root):
    dataset = record_random()
    data_file(dataset).with_name("metadata.json").write_text("{")
    with pytest.raises(DatasetError, match=f"dataset {ID} in .* cannot be opened"):
        load_trajectories(ID)


@pytest.mark.faults
def test_a_missing_data_file_is_reported(minari_root):
    data_file(record_random()).unlink()
    with pytest.raises(
        DatasetError, match=f"dataset {ID} in .* cannot be opened: .*main_data.hdf5 is missing"
    ):
        load_trajectories(ID)


@pytest.fixture
def unreachable(monkeypatch):
    """Set the server's address to a closed port, and return it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.delenv("MINARI_REMOTE", raising=False)
    return address


def test_a_download_without_network_fails_immediately(minari_root, unreachable, monkeypatch):
    monkeypatch.setattr(minari, "download_dataset", lambda _: pytest.fail("called Minari"))
    with pytest.raises(
        ConnectionError,
        match=f"cannot download {ID}: {unreachable} cannot be reached .*copy the dataset to .*small-v0",
    ):
        load_trajectories(ID, download=True)


def test_a_local_dataset_is_not_downloaded(minari_root, unreachable):
    record_random()
    assert load_trajectories(ID, download=True).steps == 9


@pytest.fixture
def server(monkeypatch):
    """Simulate a reachable server; tests replace Minari's download function."""
    monkeypatch.setenv("MINARI_REMOTE", "gcp://somewhere")


def test_a_missing_dataset_is_downloaded(minari_root, server, monkeypatch):
    monkeypatch.setattr(minari, "download_dataset", lambda name: record_random(dataset_id=name))
    assert load_trajectories(ID, download=True).dataset_ids == (ID,)


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (ValueError("no such version"), DatasetError, "cannot be downloaded: no such version"),
        (RuntimeError("line cut"), ConnectionError, r"the download of .* failed \(line cut\)"),
    ],
    ids=["unknown dataset", "interrupted"],
)
def test_a_failed_download_is_reported(minari_root, server, monkeypatch, failure, kind, message):
    def fail(_):
        raise failure

    monkeypatch.setattr(minari, "download_dataset", fail)
    with pytest.raises(kind, match=message):
        load_trajectories(ID, download=True)


# Incomplete datasets


def files_in(folder):
    """Return the content of each file below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def server_folder(minari_root, server, monkeypatch):
    """Return a server's folder with the dataset `ID`, from which Minari's download copies each file."""
    record_random((3, 1, 5))
    folder = minari_root.rename(minari_root.with_name("server"))
    minari_root.mkdir()

    def copy(dataset_id):
        for file in sorted((folder / dataset_id).rglob("*.*")):
            target = get_dataset_path() / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
        shutil.copy(folder / "test/namespace_metadata.json", get_dataset_path() / "test")

    monkeypatch.setattr(minari, "download_dataset", copy)
    return folder


def truncate(file):
    file.write_bytes(file.read_bytes()[:-100])


CUTS = {
    "no episodes": lambda data: (data / "main_data.hdf5").unlink(),
    "no metadata": lambda data: (data / "metadata.json").unlink(),
    "half of the episodes": lambda data: truncate(data / "main_data.hdf5"),
    "half of the metadata": lambda data: truncate(data / "metadata.json"),
    "no file": shutil.rmtree,
}


def make_incomplete(server_folder, minari_root, how):
    """Simulate the result of an earlier interrupted download in Minari's folder."""
    shutil.copytree(server_folder / ID, minari_root / ID)
    CUTS[how](minari_root / ID / "data")
    return files_in(minari_root)


@pytest.mark.faults
@pytest.mark.parametrize("how", CUTS)
def test_an_incomplete_dataset_is_reported_and_repaired_by_a_download(how, server_folder, minari_root):
    make_incomplete(server_folder, minari_root, how)
    with pytest.raises(DatasetError, match=r"small-v0.*download=True"):
        load_trajectories(ID)
    assert load_trajectories(ID, download=True).lengths.tolist() == [3, 1, 5]
    assert files_in(minari_root) == files_in(server_folder)


ENDS = {
    "silently": (None, ConnectionError, r"failed .*main_data\.hdf5 is missing.*unchanged"),
    "with an error": (RuntimeError("line cut"), ConnectionError, r"failed \(line cut\).*unchanged"),
    "by Ctrl-C": (KeyboardInterrupt(), KeyboardInterrupt, None),
}


@pytest.mark.faults
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("how", [*CUTS, "nothing"])
def test_an_interrupted_download_changes_nothing(how, ends, server_folder, minari_root, monkeypatch):
    error, raised, message = ENDS[ends]

    def fetch(dataset_id):
        """Copy only the first of two files."""
        (get_dataset_path(dataset_id) / "data").mkdir(parents=True)
        shutil.copy(server_folder / ID / "data/metadata.json", get_dataset_path(dataset_id) / "data")
        if error is not None:
            raise error

    before = {} if how == "nothing" else make_incomplete(server_folder, minari_root, how)
    monkeypatch.setattr(minari, "download_dataset", fetch)
    with pytest.raises(raised, match=message):
        load_trajectories(ID, download=True)
    assert files_in(minari_root) == before
    assert os.environ["MINARI_DATASETS_PATH"] == str(minari_root)


@pytest.mark.faults
def test_the_first_of_two_concurrent_downloads_is_kept(server_folder, minari_root, monkeypatch):
    copy = minari.download_dataset

    def copy_after_other_process(dataset_id):
        copy(dataset_id)
        shutil.copytree(server_folder / ID, minari_root / ID)
        (minari_root / ID / "marker").touch()

    monkeypatch.setattr(minari, "download_dataset", copy_after_other_process)
    assert load_trajectories(ID, download=True).steps == 9
    assert (minari_root / ID / "marker").exists()


def test_downloads_use_minaris_default_folder(server_folder, minari_root, tmp_path, monkeypatch):
    monkeypatch.delenv("MINARI_DATASETS_PATH")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_trajectories(ID, download=True).steps == 9
    assert files_in(tmp_path / ".minari/datasets") == files_in(server_folder)
    assert "MINARI_DATASETS_PATH" not in os.environ


def test_parts_of_a_combined_dataset_are_downloaded(server_folder, minari_root, monkeypatch):
    """Minari downloads the parts; a local copy of a part stays unchanged."""
    copy = minari.download_dataset
    for part in ("test/new-v0", "test/here-v0"):
        shutil.copytree(server_folder / ID, server_folder / part)
        metadata = server_folder / part / "data/metadata.json"
        metadata.write_text(metadata.read_text().replace(ID, part))
    shutil.copytree(server_folder / "test/here-v0", minari_root / "test/here-v0")
    (minari_root / "test/here-v0/marker").touch()
    monkeypatch.setattr(
        minari, "download_dataset", lambda _: [copy(each) for each in (ID, "test/new-v0", "test/here-v0")]
    )
    load_trajectories(ID, download=True)
    assert sorted(minari.list_local_datasets()) == ["test/here-v0", "test/new-v0", ID]
    assert (minari_root / "test/here-v0/marker").exists()


@pytest.mark.parametrize("signature", [b"TREE", b"SNOD", b"HEAP"])
def test_a_damaged_table_of_episodes_is_an_error_of_the_dataset(minari_root, signature):
    """The names of the episodes are in a group table, whose damage h5py reports as a RuntimeError."""
    file = data_file(record_random())
    file.write_bytes(file.read_bytes().replace(signature, b"XXXX"))
    with pytest.raises(DatasetError, match=r"truncated or altered|cannot be read"):
        load_trajectories(ID)


# Datasets that are not damaged, but cannot be read


def test_a_dataset_that_another_program_holds_open_is_not_replaced(server_folder, minari_root):
    shutil.copytree(server_folder / ID, minari_root / ID)
    (minari_root / ID / "marker").touch()
    with open(minari_root / ID / "data/main_data.hdf5", "rb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        for download in (False, True):
            with pytest.raises(DatasetError, match=r"main_data\.hdf5 cannot be read \(Resource"):
                load_trajectories(ID, download=download)
    assert load_trajectories(ID).steps == 9
    assert (minari_root / ID / "marker").exists()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_errors_of_the_system_are_no_damage(minari_root, monkeypatch, code):
    dataset = record_random()

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(h5py, "File", refuse)
    for each in (ID, dataset):
        with pytest.raises(DatasetError) as error:
            load_trajectories(each)
        assert f"cannot be read ({os.strerror(code)})" in str(error.value)


@pytest.mark.parametrize("indices", [[7], [-1], [0.0, 1.0], [True, False, True], ["0"]])
def test_selections_of_missing_episodes_are_refused(minari_root, indices):
    folder = data_file(record_random()).parent
    dataset = minari.MinariDataset(folder, episode_indices=np.array(indices))
    with pytest.raises(DatasetError) as error:
        load_trajectories(dataset)
    assert f"selected episodes of dataset {ID} must be integers from 0 to 2, got {indices}" in str(
        error.value
    )
    assert "altered" not in str(error.value)


def test_a_dataset_of_a_newer_minari_names_both_versions(minari_root):
    path = data_file(record_random()).with_name("metadata.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"minari_version": "99.0.1"}))
    with pytest.raises(DatasetError, match=r"made by Minari '99\.0\.1', and the installed Minari 0\.5"):
        load_trajectories(ID)


@pytest.mark.parametrize("stated", ["test/other-v0", "test/\x1b[31m-v0", ["x"], None])
def test_metadata_of_another_id_are_refused(minari_root, stated):
    path = data_file(record_random()).with_name("metadata.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dataset_id": stated}))
    with pytest.raises(DatasetError, match=f"dataset {ID} in .* has the id .*move the folder") as error:
        load_trajectories(ID)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "space",
    [
        {"type": "Tuple", "subspaces": 5},
        {"type": "Dict", "subspaces": [1]},
        {"type": "Dict", "subspaces": {"a": {"type": "Tuple", "subspaces": None}}},
        {"type": "Tuple"},
    ],
)
def test_malformed_spaces_are_errors_of_the_dataset(minari_root, space):
    path = data_file(record_random()).with_name("metadata.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"observation_space": json.dumps(space)}))
    with pytest.raises(DatasetError, match=f"dataset {ID} in .* cannot be opened"):
        load_trajectories(ID)
