"""Folder with the agent of a run, to be sent, or kept in a repository of source code."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from rlxf.utils.files import create_folder

Content = Path | bytes | Callable[[Path], object]
"""Content of a file: the path of a file to copy, the bytes, or a function that writes the file."""


def pack(path: Path, files: Mapping[str, Content]) -> None:
    """Write the files of a shared run into a new folder, atomically.

    Args:
        path: folder to create.
        files: name of a file -> its content.

    Raises:
        FileExistsError: if ``path`` exists.
        OSError: if a file cannot be written, e.g. because the disk is full. Nothing is left on the disk.
    """

    def fill(folder: Path) -> None:
        for name, content in files.items():
            _write(folder / name, content)

    create_folder(path, fill)


def _write(file: Path, content: Content) -> None:
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif isinstance(content, Path):
        shutil.copyfile(content, file)
    else:
        content(file)
