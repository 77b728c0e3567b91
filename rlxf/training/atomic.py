"""Atomic writes: at any moment, a path holds either the complete old file or the complete new file."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from rlxf.utils.permissions import GROUP_AND_OTHERS_WRITE

TEMPORARY = ".rlxf-{}.tmp"
ANY_UUID = "[0-9a-f]" * 32
ABANDONED_SECONDS = 3600
"""Age in seconds after which an unmodified temporary file is attributed to a killed process."""
NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}
"""Error numbers of file systems, and of folders without read permission, that cannot sync a folder."""


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


def _write_and_rename(target: Path, write: Callable[[BinaryIO], object]) -> None:
    sweep(target.parent)
    temporary = target.with_name(TEMPORARY.format(uuid4().hex))
    try:
        with open(temporary, "x+b", opener=_open) as handle:
            write(handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags, 0o666 & ~GROUP_AND_OTHERS_WRITE)


def sweep(folder: Path) -> None:
    """Remove temporary files and folders, left by killed processes, that are older than an hour."""
    for abandoned in folder.glob(TEMPORARY.format(ANY_UUID)):
        with suppress(OSError):  # removed meanwhile, or owned by another user
            if time.time() - abandoned.lstat().st_mtime > ABANDONED_SECONDS:
                _remove(abandoned)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


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
