"""Arrays on disk that are written row by row and read as memory maps."""

import hashlib
import os
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray


class ArrayFile:
    """Context manager that writes a new ``.npy`` file of known shape from the first row to the last.

    If the context exits without an error, the file is synced to the disk.

    Args:
        path: path of the file, which must not exist.
        shape: shape of the array, (rows, ...).
        dtype: dtype of the array.

    Raises:
        OSError: on entering, appending or exiting, if the disk is full or the file cannot be written.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: DTypeLike):
        self.path = path
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self._hash = hashlib.sha256()

    def __enter__(self) -> Self:
        self._handle = open(self.path, "xb")
        header = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False, "shape": self.shape}
        npy.write_array_header_1_0(self, header)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._handle:
            if kind is None:
                self._handle.flush()
                os.fsync(self._handle.fileno())

    def write(self, data: Any) -> None:
        """Append bytes. Numpy also calls this method, to write the header."""
        self._hash.update(data)
        self._handle.write(data)

    def append(self, rows: NDArray[Any]) -> None:
        """Append rows (n, ...)."""
        self.write(np.ascontiguousarray(rows, self.dtype).data)

    def describe(self) -> dict[str, Any]:
        """Return size in bytes and SHA-256 of the complete file, and shape and dtype of the array."""
        form = {"shape": list(self.shape), "dtype": self.dtype.name}
        return {"size": self.path.stat().st_size, "sha256": self._hash.hexdigest(), **form}


def open_array(path: Path) -> NDArray[Any]:
    """Open the array of a ``.npy`` file as a read-only memory map."""
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
