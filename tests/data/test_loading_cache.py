"""Tests of the cache of converted datasets: reuse, verification and atomic updates."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from rlxf.data import DatasetError, cache, catalog, load_trajectories
from rlxf.data.cache import cache_root
from rlxf.data.catalog import summarize
from rlxf.data.dataset_source import open_source
from rlxf.utils import files
from tests.datasets import ID, data_file, opened, random_episodes, record_random
from tests.sources import ROOT

ARRAYS = ("observations", "actions", "rewards", "return_to_go", "offsets", "terminated", "truncated")
LOAD = f"from rlxf.data import load_trajectories; print(load_trajectories({ID!r}).rewards.sum())"


@pytest.fixture
def dataset(minari_root):
    return record_random((3, 1, 5))


@pytest.fixture
def conversions(monkeypatch):
    """Return a list of the calls of `convert`."""
    calls = []
    convert = cache.convert

    def counted(*args):
        calls.append(args)
        return convert(*args)

    monkeypatch.setattr(cache, "convert", counted)
    return calls


def caches():
    return [path for path in cache_root().iterdir()] if cache_root().exists() else []


def only_cache():
    (folder,) = caches()
    return folder


def test_a_dataset_is_converted_once(dataset, conversions):
    first, second = load_trajectories(ID), load_trajectories(dataset)
    assert len(conversions) == 1
    np.testing.assert_array_equal(first.observations, second.observations)


def test_a_filtered_dataset_has_a_separate_cache(dataset, conversions):
    filtered = dataset.filter_episodes(lambda episode: len(episode) > 1)
    for _ in range(2):
        assert (load_trajectories(ID).episodes, load_trajectories(filtered).episodes) == (3, 2)
    assert len(conversions) == 2


def test_the_manifest_contains_size_hash_shape_and_dtype(dataset):
    load_trajectories(ID)
    manifest = json.loads((only_cache() / "manifest.json").read_text())
    assert set(ARRAYS) < set(manifest["arrays"])
    entry = manifest["arrays"]["observations"]
    assert (entry["shape"], entry["dtype"]) == ([9, 3], "float32")
    digest = subprocess.run(["sha256sum", only_cache() / "observations.npy"], capture_output=True, check=True)
    assert digest.stdout.decode().split()[0] == entry["sha256"]


def test_an_extended_dataset_is_converted_again(dataset):
    load_trajectories(ID)
    dataset.update_dataset_from_buffer(random_episodes((4,)))
    assert load_trajectories(ID).lengths.tolist() == [3, 1, 5, 4]


def test_a_modified_file_is_converted_again(dataset, conversions):
    load_trajectories(ID)
    with opened(dataset) as file:
        file["episode_0/rewards"][0] = 7
    assert load_trajectories(ID).rewards[0] == 7
    assert (len(conversions), len(caches())) == (2, 1)


def unused_for(folder, days):
    """Set the time since the last load of a conversion."""
    then = time.time() - days * 24 * 3600
    os.utime(folder / "manifest.json", (then, then))


def test_unused_conversions_of_earlier_versions_are_removed(dataset):
    """Conversions of other datasets and of other selections of episodes are kept."""
    other = record_random((2,), "test/small-v1")
    selected = dataset.filter_episodes(lambda episode: len(episode) > 1)
    for each in (other, selected, [dataset, other], dataset):
        load_trajectories(each)
    for folder in caches():
        unused_for(folder, 8)
    kept = {folder for folder in caches() if folder != cache.cache_folder([open_source(ID)])}
    dataset.update_dataset_from_buffer(random_episodes((4,)))
    load_trajectories(ID)
    assert set(caches()) == kept | {cache.cache_folder([open_source(ID)])}
    load_trajectories([ID, other])
    assert len(caches()) == len(kept) + 1


def test_conversions_of_earlier_versions_are_kept_for_a_week_after_their_last_load(dataset):
    load_trajectories(ID)
    unused_for(only_cache(), 8)
    earlier = load_trajectories(ID)
    observations = earlier.observations.copy()
    unused_for(only_cache(), 6)
    dataset.update_dataset_from_buffer(random_episodes((4,)))
    load_trajectories(ID)
    assert len(caches()) == 2
    for folder in caches():
        unused_for(folder, 8)
    dataset.update_dataset_from_buffer(random_episodes((2,)))
    assert load_trajectories(ID).episodes == 5
    assert len(caches()) == 1
    np.testing.assert_array_equal(earlier.observations, observations)


def test_a_summary_is_no_load(dataset):
    load_trajectories(ID)
    unused_for(only_cache(), 8)
    before = (only_cache() / "manifest.json").stat().st_mtime
    summarize(ID)
    assert (only_cache() / "manifest.json").stat().st_mtime == before


def test_an_error_while_outdated_conversions_are_removed_is_no_failed_conversion(dataset, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "no folder")

    monkeypatch.setattr(cache, "_remove_outdated", fail)
    with pytest.raises(OSError, match="no folder") as failure:
        load_trajectories(ID)
    assert "cannot write the converted dataset" not in str(failure.value)
    assert load_trajectories(ID).steps == 9


def test_each_load_is_a_use(dataset):
    load_trajectories(ID)
    unused_for(only_cache(), 8)
    load_trajectories(ID)
    assert time.time() - (only_cache() / "manifest.json").stat().st_mtime < 3600


def test_summaries_equal_those_of_the_file_and_read_the_cache(dataset, monkeypatch):
    before = summarize(ID)
    load_trajectories(ID)
    monkeypatch.setattr(catalog, "EpisodeFile", None)
    after = summarize(ID)
    np.testing.assert_array_equal(after.lengths, before.lengths)
    np.testing.assert_allclose(after.returns, before.returns, rtol=1e-6)
    assert (after.lengths.dtype, after.returns.dtype) == (before.lengths.dtype, before.returns.dtype)


@pytest.mark.faults
@pytest.mark.parametrize("name", [*ARRAYS, "observation_mean"])
def test_a_truncated_array_is_converted_again(dataset, conversions, name):
    original = getattr(load_trajectories(ID), name).copy()
    path = only_cache() / f"{name}.npy"
    os.truncate(path, path.stat().st_size - 1)
    np.testing.assert_array_equal(getattr(load_trajectories(ID), name), original)
    assert len(conversions) == 2
    assert len(caches()) == 1


@pytest.mark.faults
@pytest.mark.parametrize("name", ["observations.npy", "manifest.json"])
def test_a_missing_file_is_converted_again(dataset, conversions, name):
    load_trajectories(ID)
    (only_cache() / name).unlink()
    assert load_trajectories(ID).steps == 9
    assert len(conversions) == 2


@pytest.mark.faults
@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 3}', '{"format": "rlxf trajectories", "version": 99}']
)
def test_an_invalid_manifest_is_converted_again(dataset, conversions, text):
    load_trajectories(ID)
    (only_cache() / "manifest.json").write_text(text)
    assert load_trajectories(ID).steps == 9
    assert len(conversions) == 2


@pytest.mark.faults
def test_an_array_of_another_shape_and_equal_size_is_converted_again(dataset, conversions):
    load_trajectories(ID)
    path = only_cache() / "observations.npy"
    path.write_bytes(path.read_bytes().replace(b"(9, 3)", b"(3, 9)"))
    assert load_trajectories(ID).observations.shape == (9, 3)
    assert len(conversions) == 2


@pytest.mark.faults
def test_verify_detects_a_changed_byte(dataset, conversions):
    rewards = load_trajectories(ID).rewards.copy()
    with open(only_cache() / "rewards.npy", "r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        handle.write(b"?")
    assert load_trajectories(ID).rewards[-1] != rewards[-1]
    np.testing.assert_array_equal(load_trajectories(ID, verify=True).rewards, rewards)
    assert len(conversions) == 2


def test_verify_does_not_convert_an_intact_cache(dataset, conversions):
    load_trajectories(ID)
    load_trajectories(ID, verify=True)
    assert len(conversions) == 1


@pytest.mark.faults
@pytest.mark.parametrize("limit", [0, 100, 5000])
def test_a_full_disk_raises_and_leaves_no_files(minari_root, limit):
    record_random((1000,))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # the kernel rejects writes beyond the limit
    try:
        with pytest.raises(
            OSError, match=rf"cannot write the converted dataset {ID}.*File too large.*RLXF_CACHE"
        ) as failure:
            load_trajectories(ID)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failure.value.errno == errno.EFBIG
    assert caches() == []
    assert load_trajectories(ID).steps == 1000


@pytest.mark.faults
def test_a_failed_sync_leaves_no_files(dataset, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        load_trajectories(ID)
    assert caches() == []


@pytest.mark.faults
def test_a_full_disk_keeps_the_earlier_cache(dataset, conversions, monkeypatch):
    original = load_trajectories(ID).rewards.copy()
    status = data_file(dataset).stat()
    os.utime(data_file(dataset), ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with monkeypatch.context() as patch:
        patch.setattr(
            cache, "write_manifest", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
        )
        with pytest.raises(OSError, match="full"):
            load_trajectories(ID)
    np.testing.assert_array_equal(np.load(only_cache() / "rewards.npy"), original)


@pytest.mark.thorough
@pytest.mark.faults
def test_files_of_a_killed_process_are_not_used(dataset):
    kill = (
        "import os, signal; from rlxf.data import cache;"
        "cache.write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL);" + LOAD
    )
    result = subprocess.run([sys.executable, "-c", kill], cwd=ROOT, check=False)
    assert result.returncode == -signal.SIGKILL
    (temporary,) = caches()
    assert temporary.match(files.TEMPORARY.format("*"))
    assert load_trajectories(ID).steps == 9
    assert len(caches()) == 2


def test_old_temporary_folders_are_removed(dataset):
    old, fresh = files.temporary_name(cache_root()), files.temporary_name(cache_root())
    for folder in (old, fresh):
        folder.mkdir(parents=True)
        (folder / "observations.npy").write_bytes(b"half")
    for path in (old / "observations.npy", old):
        os.utime(path, (0, time.time() - files.ABANDONED_SECONDS - 60))
    load_trajectories(ID)
    assert not old.exists()
    assert fresh.exists()


@pytest.mark.thorough
def test_two_concurrent_processes_share_a_cache(dataset):
    processes = [
        subprocess.Popen([sys.executable, "-c", LOAD], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(outputs) == 1
    assert len(caches()) == 1
    assert str(load_trajectories(ID, verify=True).rewards.sum()) == outputs.pop().strip()


@pytest.mark.parametrize("state", ["whole", "damaged"])
def test_the_slower_process_uses_an_intact_cache_and_replaces_a_damaged_one(dataset, monkeypatch, state):
    """The faster process finishes between the conversion and the rename of the slower process."""
    load_trajectories(ID)
    folder, faster = only_cache(), cache_root().parent / "faster"
    folder.rename(faster)
    if state == "damaged":
        (faster / "rewards.npy").write_bytes(b"")
    mark = faster / "mark"
    mark.touch()
    write = cache.write_manifest

    def write_after_other_process(*args):
        write(*args)
        shutil.copytree(faster, folder)

    monkeypatch.setattr(cache, "write_manifest", write_after_other_process)
    assert load_trajectories(ID).steps == 9
    assert (only_cache() / "mark").exists() == (state == "whole")


def test_environment_variables_set_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("RLXF_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_root() == tmp_path / "own" / "trajectories"
    monkeypatch.delenv("RLXF_CACHE")
    assert cache_root() == tmp_path / "shared" / "rlxf" / "trajectories"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "rlxf" / "trajectories"


def test_a_cache_path_that_is_a_file_is_refused(dataset, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLXF_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot write.*file.*RLXF_CACHE"):
        load_trajectories(ID)


def test_a_file_that_is_replaced_while_it_is_read_is_not_cached(dataset, monkeypatch):
    """The arrays would be those of the old file, and the manifest that of the new one."""
    convert = cache.convert

    def replaced(*args):
        found = convert(*args)
        copy = data_file(dataset).with_name("copy")
        shutil.copy(data_file(dataset), copy)
        os.replace(copy, data_file(dataset))
        return found

    monkeypatch.setattr(cache, "convert", replaced)
    with pytest.raises(DatasetError, match="was replaced while it was read; try again"):
        load_trajectories(ID)
    assert caches() == []
