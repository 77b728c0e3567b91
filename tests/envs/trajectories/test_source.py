import os
import shutil
import socket

import minari
import pytest
from huggingface_hub import constants
from minari.storage.datasets_root_dir import get_dataset_path

from rlxf.envs.trajectories import DatasetError, load_trajectories
from rlxf.envs.trajectories.source import open_source
from tests.datasets import ID, data_file, record_random


def test_an_unknown_dataset_is_told_the_near_names(minari_root):
    record_random()
    with pytest.raises(
        DatasetError,
        match=r"smal-v0' is not in .*minari \(near names: test/small-v0\).*download=True \(--download\)",
    ):
        load_trajectories("test/smal-v0")


@pytest.mark.parametrize("wrong", ["no version", "hopper/medium", "", "../x"])
def test_what_is_no_id_is_refused(minari_root, wrong):
    with pytest.raises(DatasetError, match=f"'{wrong}' is no Minari id; write namespace/name-v0"):
        load_trajectories(wrong)


def test_what_is_no_dataset_is_refused(minari_root):
    with pytest.raises(TypeError, match="a Minari id or a MinariDataset, got 3"):
        load_trajectories(3)


def test_an_empty_dataset_is_refused(minari_root):
    dataset = record_random().filter_episodes(lambda episode: False)
    with pytest.raises(DatasetError, match=f"{ID} has no episodes"):
        load_trajectories(dataset)


def test_a_dataset_with_no_episode_on_disk_is_refused(minari_root):
    record_random(())
    with pytest.raises(DatasetError, match=f"{ID} has no episodes"):
        load_trajectories(ID)


def edit_metadata(dataset, old, new):
    path = data_file(dataset).with_name("metadata.json")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_another_format_is_refused_with_the_reason(minari_root):
    dataset = record_random()
    edit_metadata(dataset, '"hdf5"', '"arrow"')
    with pytest.raises(DatasetError, match=r"stored as arrow; only hdf5 is read"):
        open_source(dataset)


@pytest.mark.faults
def test_metadata_that_are_none_are_named(minari_root):
    dataset = record_random()
    data_file(dataset).with_name("metadata.json").write_text("{")
    with pytest.raises(DatasetError, match=f"dataset {ID} in .* cannot be opened"):
        load_trajectories(ID)


@pytest.mark.faults
def test_a_missing_data_file_is_named(minari_root):
    data_file(record_random()).unlink()
    with pytest.raises(
        DatasetError, match=f"dataset {ID} in .* cannot be opened: .*main_data.hdf5 is missing"
    ):
        load_trajectories(ID)


@pytest.fixture
def nobody(monkeypatch):
    """The server's address leads to a port at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.delenv("MINARI_REMOTE", raising=False)
    return address


def test_without_a_network_a_download_says_so_at_once(minari_root, nobody, monkeypatch):
    monkeypatch.setattr(minari, "download_dataset", lambda _: pytest.fail("asked Minari"))
    with pytest.raises(
        ConnectionError,
        match=f"cannot download {ID}: {nobody} gave no answer .*copy the dataset to .*small-v0",
    ):
        load_trajectories(ID, download=True)


def test_what_is_here_is_not_downloaded(minari_root, nobody):
    record_random()
    assert load_trajectories(ID, download=True).steps == 9


@pytest.fixture
def server(monkeypatch):
    """A server that lives; what Minari does with it is up to the test."""
    monkeypatch.setenv("MINARI_REMOTE", "gcp://somewhere")


def test_what_is_missing_is_downloaded(minari_root, server, monkeypatch):
    monkeypatch.setattr(minari, "download_dataset", lambda name: record_random(dataset_id=name))
    assert load_trajectories(ID, download=True).dataset_ids == (ID,)


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (ValueError("no such version"), DatasetError, "cannot be downloaded: no such version"),
        (RuntimeError("line cut"), ConnectionError, r"the download of .* broke off \(line cut\)"),
    ],
    ids=["unknown there", "broken off"],
)
def test_a_download_that_fails_is_named(minari_root, server, monkeypatch, failure, kind, message):
    def fail(_):
        raise failure

    monkeypatch.setattr(minari, "download_dataset", fail)
    with pytest.raises(kind, match=message):
        load_trajectories(ID, download=True)


# Half of a dataset


def everything_in(folder):
    """Each file below a folder, and its bytes."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def far(minari_root, server, monkeypatch):
    """A server's folder with the dataset `ID`; Minari's download copies from it, file by file."""
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


def cut(far, minari_root, how):
    """What an interrupted download of long ago left in Minari's folder."""
    shutil.copytree(far / ID, minari_root / ID)
    CUTS[how](minari_root / ID / "data")
    return everything_in(minari_root)


@pytest.mark.faults
@pytest.mark.parametrize("how", CUTS)
def test_half_of_a_dataset_is_told_and_mended_by_a_download(how, far, minari_root):
    cut(far, minari_root, how)
    with pytest.raises(DatasetError, match=r"small-v0.*download=True"):
        load_trajectories(ID)
    assert load_trajectories(ID, download=True).lengths.tolist() == [3, 1, 5]
    assert everything_in(minari_root) == everything_in(far)


ENDS = {
    "silently": (None, ConnectionError, r"broke off .*main_data\.hdf5 is missing.*as it was"),
    "with an error": (RuntimeError("line cut"), ConnectionError, r"broke off \(line cut\).*as it was"),
    "by Ctrl-C": (KeyboardInterrupt(), KeyboardInterrupt, None),
}


@pytest.mark.faults
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("how", [*CUTS, "nothing"])
def test_a_download_that_is_cut_leaves_what_was_there(how, ends, far, minari_root, monkeypatch):
    error, raised, message = ENDS[ends]

    def fetch(dataset_id):
        """The first file of the two."""
        (get_dataset_path(dataset_id) / "data").mkdir(parents=True)
        shutil.copy(far / ID / "data/metadata.json", get_dataset_path(dataset_id) / "data")
        if error is not None:
            raise error

    before = {} if how == "nothing" else cut(far, minari_root, how)
    monkeypatch.setattr(minari, "download_dataset", fetch)
    with pytest.raises(raised, match=message):
        load_trajectories(ID, download=True)
    assert everything_in(minari_root) == before
    assert os.environ["MINARI_DATASETS_PATH"] == str(minari_root)


@pytest.mark.faults
def test_of_two_downloads_at_once_the_first_to_finish_stays(far, minari_root, monkeypatch):
    copy = minari.download_dataset

    def overtaken(dataset_id):
        copy(dataset_id)
        shutil.copytree(far / ID, minari_root / ID)
        (minari_root / ID / "theirs").touch()

    monkeypatch.setattr(minari, "download_dataset", overtaken)
    assert load_trajectories(ID, download=True).steps == 9
    assert (minari_root / ID / "theirs").exists()


def test_where_minari_keeps_datasets_by_itself(far, minari_root, tmp_path, monkeypatch):
    monkeypatch.delenv("MINARI_DATASETS_PATH")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_trajectories(ID, download=True).steps == 9
    assert everything_in(tmp_path / ".minari/datasets") == everything_in(far)
    assert "MINARI_DATASETS_PATH" not in os.environ


def test_parts_of_a_combined_dataset_come_along(far, minari_root, monkeypatch):
    """As Minari downloads them; one that is here already stays as it is."""
    copy = minari.download_dataset
    for part in ("test/new-v0", "test/here-v0"):
        shutil.copytree(far / ID, far / part)
        metadata = far / part / "data/metadata.json"
        metadata.write_text(metadata.read_text().replace(ID, part))
    shutil.copytree(far / "test/here-v0", minari_root / "test/here-v0")
    (minari_root / "test/here-v0/mine").touch()
    monkeypatch.setattr(
        minari, "download_dataset", lambda _: [copy(each) for each in (ID, "test/new-v0", "test/here-v0")]
    )
    load_trajectories(ID, download=True)
    assert sorted(minari.list_local_datasets()) == ["test/here-v0", "test/new-v0", ID]
    assert (minari_root / "test/here-v0/mine").exists()
