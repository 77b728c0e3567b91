"""Tests of atomic writes, and of locks of folders."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from rlxf.training import atomic_write
from rlxf.utils.files import temporary_folder, temporary_name, try_lock, try_lock_folder
from tests.training.samples import files_in


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    return path


def test_new_content_replaces_old_content(target):
    atomic_write(target, lambda handle: handle.write(b"new"))
    assert target.read_bytes() == b"new"
    assert files_in(target.parent) == {"file"}


@pytest.mark.parametrize("failure", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_error_of_the_writer_leaves_the_old_file(target, failure):
    def write(handle):
        handle.write(b"half")
        raise failure

    with pytest.raises(type(failure)):
        atomic_write(target, write)
    assert target.read_bytes() == b"old"
    assert files_in(target.parent) == {"file"}


def test_old_file_exists_during_the_write(target):
    def write(handle):
        handle.write(b"half")
        handle.flush()
        assert target.read_bytes() == b"old"

    atomic_write(target, write)
    assert target.read_bytes() == b"half"


@pytest.mark.faults
@pytest.mark.parametrize("limit", [0, 1, 5000, 99_999])
def test_full_disk_is_reported_and_the_old_file_is_unchanged(target, limit):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # the kernel refuses bytes beyond it
    try:
        with pytest.raises(OSError, match=r"file.*File too large.*unchanged") as failure:
            atomic_write(target, lambda handle: handle.write(bytes(100_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failure.value.errno == errno.EFBIG
    assert target.read_bytes() == b"old"
    assert files_in(target.parent) == {"file"}


@pytest.mark.faults
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failing_system_call_leaves_the_old_file(target, call, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match=r"file.*Input/output error"):
        atomic_write(target, lambda handle: handle.write(b"new"))
    assert target.read_bytes() == b"old"
    assert files_in(target.parent) == {"file"}


def test_file_is_synced_before_the_rename_and_the_folder_after(target, monkeypatch):
    calls = []
    sync, rename = os.fsync, os.replace

    def record_sync(descriptor):
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"
        calls.append(f"sync {kind}")
        sync(descriptor)

    def record_rename(source, destination):
        calls.append("rename")
        rename(source, destination)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_rename)
    atomic_write(target, lambda handle: handle.write(b"new"))
    assert calls == ["sync file", "rename", "sync folder"]


@pytest.mark.parametrize("make", ["symlink_to", "hardlink_to"])
def test_link_is_replaced_and_its_target_unchanged(target, make):
    link = target.with_name("link")
    getattr(link, make)(target)
    atomic_write(link, lambda handle: handle.write(b"new"))
    assert not link.is_symlink()
    assert link.read_bytes() == b"new"
    assert target.read_bytes() == b"old"


def test_link_to_a_folder_is_replaced(target):
    folder = target.with_name("folder")
    folder.mkdir()
    link = target.with_name("link")
    link.symlink_to(folder)
    atomic_write(link, lambda handle: handle.write(b"new"))
    assert link.read_bytes() == b"new"
    assert not files_in(folder)


def test_file_is_not_writable_by_others_for_any_umask(target):
    before = os.umask(0)
    try:
        atomic_write(target, lambda handle: handle.write(b"new"))
    finally:
        os.umask(before)
    assert target.stat().st_mode & 0o777 == 0o644


def test_file_has_default_permissions(target):
    plain = target.with_name("plain")
    plain.touch()
    atomic_write(target, lambda handle: handle.write(b"new"))
    assert target.stat().st_mode == plain.stat().st_mode


def test_missing_folder_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        atomic_write(tmp_path / "nowhere" / "file", lambda handle: None)


def test_a_folder_is_not_replaced(tmp_path):
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        atomic_write(tmp_path, lambda handle: None)


def temporary_file(folder, name=f".rlxf-{'0a' * 16}.tmp", seconds_ago=7200.0):
    """Create a temporary file like that of a process killed during a write."""
    path = folder / name
    path.write_bytes(b"half")
    os.utime(path, (time.time() - seconds_ago,) * 2)
    return path


def test_old_temporary_files_are_removed(target):
    left = temporary_file(target.parent)
    atomic_write(target, lambda handle: handle.write(b"new"))
    assert not left.exists()
    assert target.read_bytes() == b"new"


def test_recent_temporary_files_are_kept(target):
    recent = temporary_file(target.parent, seconds_ago=60)
    atomic_write(target, lambda handle: handle.write(b"new"))
    assert recent.read_bytes() == b"half"


def test_temporary_folder_is_removed_at_the_end(tmp_path):
    with temporary_folder(tmp_path / "new") as folder:
        (folder / "file").write_bytes(b"half")
    assert not list((tmp_path / "new").iterdir())


def test_old_folder_with_a_recently_written_file_is_kept(tmp_path):
    folder = temporary_name(tmp_path)
    folder.mkdir()
    (folder / "growing").write_bytes(b"half")
    os.utime(folder, (0, 0))
    with temporary_folder(tmp_path):
        assert folder.exists()
    os.utime(folder / "growing", (0, 0))
    with temporary_folder(tmp_path):
        assert not folder.exists()


@pytest.mark.parametrize(
    "name", [".rlxf-mine.tmp", f"rlxf-{'0a' * 16}.tmp", f".rlxf-{'0a' * 16}.zip", "a.tmp"]
)
def test_files_with_other_names_are_kept(target, name):
    other = temporary_file(target.parent, name)
    atomic_write(target, lambda handle: handle.write(b"new"))
    assert other.exists()


@pytest.mark.thorough
@pytest.mark.faults
def test_temporary_file_of_a_killed_writer_is_removed(target):
    write = "from rlxf.training import atomic_write; import os, sys, signal; "
    write += "atomic_write(sys.argv[1], lambda handle: os.kill(os.getpid(), signal.SIGKILL))"
    killed = subprocess.run([sys.executable, "-c", write, target], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert target.read_bytes() == b"old"
    (left,) = files_in(target.parent) - {"file"}
    os.utime(target.parent / left, (0, 0))
    atomic_write(target, lambda handle: handle.write(b"new"))
    assert files_in(target.parent) == {"file"}


def test_a_lock_of_a_folder_ends_with_its_stack_or_process(tmp_path):
    holder = (
        "import sys, time; from contextlib import ExitStack; from pathlib import Path;"
        "from rlxf.utils.files import try_lock_folder; stack = ExitStack();"
        "print(try_lock_folder(Path(sys.argv[1]), stack), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", holder, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"True\n"
        with ExitStack() as stack:
            assert not try_lock_folder(tmp_path, stack)
        process.kill()
    for _ in range(2):
        with ExitStack() as stack:
            assert try_lock_folder(tmp_path, stack)
    assert files_in(tmp_path) == set()


def test_nothing_is_locked_on_windows(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with open(tmp_path / "lock", "wb") as first, open(tmp_path / "lock", "wb") as second:
        assert try_lock(first.fileno())
        assert try_lock(second.fileno())


@pytest.mark.parametrize("function", ["os.open", "fcntl.flock"])
def test_folders_that_cannot_be_locked_count_as_unlocked(tmp_path, monkeypatch, function):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(*{"os.open": (os, "open"), "fcntl.flock": (fcntl, "flock")}[function], refuse)
    with ExitStack() as stack:
        assert try_lock_folder(tmp_path, stack)
