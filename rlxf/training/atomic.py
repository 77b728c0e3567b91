"""Writing a file so that at every moment either the old one or the new one is there, whole."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from rlxf.utils.permissions import OTHERS_MAY_WRITE

TEMPORARY = ".rlxf-{}.tmp"
ANY_UUID = "[0-9a-f]" * 32
ABANDONED_SECONDS = 3600
"""A temporary file that nobody has written to for so long is of a process that was killed."""
NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}
"""What some file systems, and folders that may be written but not read, say to the sync of a folder."""


def atomic_write(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Replace the file at ``path`` by what ``write`` puts into the handle it is given.

    The bytes go to a temporary file ``.rlxf-*.tmp`` in the same folder, are synced to the disk and
    renamed to ``path``; then the folder is synced. A link at ``path`` is replaced, not followed: the file
    that it leads to stays as it is. Group and others may not write to the file, whatever the umask is.
    Errors of ``write`` are raised again, the temporary file is removed and the file at ``path`` is as
    before. Temporary files that killed processes left in the folder an hour ago or longer are removed too.

    Args:
        path: the file to write; its folder must exist.
        write: gets a binary file, open for writing, reading and seeking.

    Raises:
        OSError: if the disk is full, the folder is missing or not writable; with the original ``errno``,
            the path and the reason.
    """
    target = Path(path).parent.resolve() / Path(path).name
    if target.is_dir() and not target.is_symlink():
        raise IsADirectoryError(f"cannot write {target}: it is a folder; give the name of a file")
    try:
        _write_and_rename(target, write)
    except OSError as error:
        reason = f"cannot write {target} ({error.strerror or error}); what was there before is unchanged"
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
    return os.open(path, flags, 0o666 & ~OTHERS_MAY_WRITE)


def sweep(folder: Path) -> None:
    """Remove temporary files and folders that killed processes left in a folder an hour ago or longer."""
    for abandoned in folder.glob(TEMPORARY.format(ANY_UUID)):
        with suppress(OSError):  # gone already, or another user's
            if time.time() - abandoned.lstat().st_mtime > ABANDONED_SECONDS:
                _remove(abandoned)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync_folder(folder: Path) -> None:
    """Have the names in a folder outlast a loss of power, where the system offers that."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot open a folder; there the rename is all there is
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
