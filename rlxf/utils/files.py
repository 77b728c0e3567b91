"""Files and folders that rlxf writes: their permissions, and atomic writes."""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from rlxf.utils.shared_context import SharedContext

MAX_LOG_BYTES = 64 * 2**20
"""Largest size of a log file; a ``progress.csv`` of 100,000 rows has about 50 MB."""
GROUP_AND_OTHERS_WRITE = 0o022
"""Mode bits that give write permission to group and others."""


@contextmanager
def _restricted_umask() -> Iterator[None]:
    before = os.umask(GROUP_AND_OTHERS_WRITE)
    os.umask(before | GROUP_AND_OTHERS_WRITE)
    try:
        yield
    finally:
        os.umask(before)


_RESTRICTED_UMASK = SharedContext(_restricted_umask)


def not_writable_by_others() -> SharedContext:
    """Limit the mode of new files to 0o644 and of new folders to 0o755 in this context, for any umask.

    The umask belongs to the process, so the limit also applies to files that other threads create meanwhile.
    The context manager also works as a decorator.
    """
    return _RESTRICTED_UMASK


@not_writable_by_others()
def make_folder(path: Path, exist_ok: bool = False) -> None:
    """Create a folder and its parents, without write permission for group and others.

    Args:
        path: the folder.
        exist_ok: whether the folder may exist; its permissions are then unchanged.

    Raises:
        OSError: if the folder cannot be created.
    """
    path.mkdir(parents=True, exist_ok=exist_ok)


TEMPORARY = ".rlxf-{}.tmp"
ANY_UUID = "[0-9a-f]" * 32
ABANDONED_SECONDS = 3600
"""Age in seconds after which an unmodified temporary file is attributed to a killed process."""
NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}
"""Error numbers for a folder that cannot be synced, because of its file system or without read permission."""


def atomic_write(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Replace the file at ``path`` atomically by the bytes that ``write`` writes.

    The bytes are written to a temporary file ``.rlxf-*.tmp`` in the same folder, synced to the disk and
    renamed to ``path``; then the folder is synced. A symbolic link at ``path`` is replaced, not followed.
    The file has no write permission for group and others, for any umask. If ``write`` raises an error, the
    temporary file is removed, the file at ``path`` is unchanged, and the error propagates. Temporary files
    in the folder that are older than an hour, left by killed processes, are removed, too.

    Args:
        path: the file to write; its folder must exist.
        write: function that receives a binary file, open for writing, reading and seeking.

    Raises:
        OSError: if the disk is full, or the folder is missing or not writable. The error has the original
            ``errno``, the path and the reason.
    """
    target = Path(path).parent.resolve() / Path(path).name
    if target.is_dir() and not target.is_symlink():
        raise IsADirectoryError(f"cannot write {target}: it is a folder; give the path of a file")
    try:
        _write_and_rename(target, write)
    except OSError as error:
        reason = f"cannot write {target} ({error.strerror or error}); an existing file is unchanged"
        raise OSError(error.errno, reason) from error
    sync_folder(target.parent)


def write_file(path: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Replace the content of a file, as `atomic_write` does.

    Args:
        path: the file to write; its folder must exist.
        data: the new content.

    Raises:
        OSError: as in `atomic_write`.
    """
    atomic_write(path, lambda handle: handle.write(data))


def _write_and_rename(target: Path, write: Callable[[BinaryIO], object]) -> None:
    remove_abandoned(target.parent)
    temporary = temporary_name(target.parent)
    try:
        with open(temporary, "x+b", opener=_open) as handle:
            write(handle)
            sync_file(handle)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags, 0o666 & ~GROUP_AND_OTHERS_WRITE)


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Create a folder ``.rlxf-*.tmp`` for the duration of the context; rename its content to keep it.

    Temporary folders in ``parent`` that killed processes left are removed, too.

    Args:
        parent: folder in which it is created, along with missing parents.

    Raises:
        OSError: if the folder cannot be created.
    """
    remove_abandoned(parent)
    folder = temporary_name(parent)
    make_folder(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def create_folder(path: Path, fill: Callable[[Path], object]) -> None:
    """Create a folder atomically: it appears with all of its files, even if the process is killed.

    Args:
        path: the folder; missing parents are created, too.
        fill: function that writes files into the folder before it appears.

    Raises:
        FileExistsError: if ``path`` exists; its content is unchanged.
        OSError: if the folder cannot be created or written; it is then removed.
    """
    if os.path.lexists(path):
        raise _exists_error(path)
    temporary = temporary_name(path.parent)
    try:
        make_folder(temporary)
    except OSError as error:
        raise type(error)(f"{path} cannot be created ({error.strerror}); choose another folder") from error
    try:
        fill(temporary)
        _rename_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename_folder(temporary: Path, path: Path) -> None:
    try:
        os.rename(temporary, path)
    except OSError as error:
        if path.exists():  # another process was faster
            raise _exists_error(path) from error
        raise
    sync_folder(path.parent)
    remove_abandoned(path.parent)


def _exists_error(path: Path) -> FileExistsError:
    return FileExistsError(f"{path} exists; choose another folder or move the existing one")


def temporary_name(parent: Path) -> Path:
    """Return an unused path ``.rlxf-*.tmp`` in a folder."""
    return parent / TEMPORARY.format(uuid4().hex)


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files and folders, left by killed processes, that did not change for an hour."""
    for abandoned in folder.glob(TEMPORARY.format(ANY_UUID)):
        with suppress(OSError):  # removed meanwhile, or owned by another user
            newest = max(path.lstat().st_mtime for path in [abandoned, *abandoned.rglob("*")])
            if time.time() - newest > ABANDONED_SECONDS:
                _remove(abandoned)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync_file(handle: BinaryIO) -> None:
    """Sync an open file to the disk."""
    handle.flush()
    os.fsync(handle.fileno())


def read_bounded(path: Path) -> bytes:
    """Return the content of a log file.

    Raises:
        ValueError: if it exceeds `MAX_LOG_BYTES`.
        OSError: if it cannot be read.
    """
    with open(path, "rb") as handle:
        data = handle.read(min(MAX_LOG_BYTES, os.fstat(handle.fileno()).st_size) + 1)
    if len(data) > MAX_LOG_BYTES:
        raise ValueError(
            f"{path} exceeds {MAX_LOG_BYTES:,} bytes, the most that is read of a log; thin it out"
        )
    return data


def check_no_links(path: Path) -> None:
    """Raise ValueError if the folder contains a symbolic link, which would redirect writes, or a device.

    A named pipe, for example, would block the program that reads it.
    """
    for folder, folders, files in os.walk(path):
        for name in sorted(folders + files):
            entry = Path(folder, name)
            if entry.is_symlink():
                raise ValueError(
                    f"{entry} is a symbolic link to {os.readlink(entry)}, and links in a run folder are not "
                    f"followed: replace it by a copy of the file or folder, or remove it"
                )
            if not (entry.is_file() or entry.is_dir()):
                raise ValueError(f"{entry} is neither a file nor a folder: remove it")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to the disk, where the operating system supports it."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot open a folder
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


def try_lock_folder(folder: Path, stack: ExitStack) -> bool:
    """Lock a folder exclusively until ``stack`` is closed; return False if it is locked already.

    No file is written, and the lock ends with the process, also after SIGKILL. Nothing is locked on Windows,
    without read permission, and on file systems without such locks, e.g. some versions of NFS.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        return try_lock(descriptor)
    except OSError:  # no permission, or no such locks
        return True


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder exclusively; return False if it is locked already.

    The lock ends when the last copy of the descriptor is closed. Nothing is locked on Windows.

    Raises:
        OSError: if the file system has no such locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
