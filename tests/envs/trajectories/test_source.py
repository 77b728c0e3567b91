import socket

import minari
import pytest
from huggingface_hub import constants

from rlxf.envs.trajectories import DatasetError, load_trajectories
from rlxf.envs.trajectories.source import open_source
from tests.datasets import ID, data_file, record_random


def test_an_unknown_dataset_is_told_the_near_names(minari_root):
    record_random()
    with pytest.raises(
        DatasetError, match=r"'test/smal-v0' is not in .*minari \(near names: test/small-v0\).*download=True"
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
    with pytest.raises(DatasetError, match=f"dataset {ID} in .* cannot be opened: No data found"):
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
        (RuntimeError("line cut"), ConnectionError, r"gave no answer \(line cut\)"),
    ],
    ids=["unknown there", "broken off"],
)
def test_a_download_that_fails_is_named(minari_root, server, monkeypatch, failure, kind, message):
    def fail(_):
        raise failure

    monkeypatch.setattr(minari, "download_dataset", fail)
    with pytest.raises(kind, match=message):
        load_trajectories(ID, download=True)
