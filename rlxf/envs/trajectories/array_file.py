"""An array on the disk that is written row by row and read as memory."""

import hashlib
import os
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray


class ArrayFile:
    """A new ``.npy`` file of known shape, written from the first row to the last; a context manager.

    On leaving without an error the file is synced to the disk.

    Args:
        path: of the file; there must be none yet.
        shape: (rows, ...).
        dtype: of the numbers.

    Raises:
        OSError: when entering, appending and leaving, if the disk is full or the file cannot be written.
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
        """Put bytes at the end, as numpy does with the header."""
        self._hash.update(data)
        self._handle.write(data)

    def append(self, rows: NDArray[Any]) -> None:
        """Put rows (n, ...) at the end."""
        self.write(np.ascontiguousarray(rows, self.dtype).data)

    def describe(self) -> dict[str, Any]:
        """Size in bytes and SHA-256 of the file, shape and dtype of the array; once all is written."""
        form = {"shape": list(self.shape), "dtype": self.dtype.name}
        return {"size": self.path.stat().st_size, "sha256": self._hash.hexdigest(), **form}


def open_array(path: Path) -> NDArray[Any]:
    """The array of a ``.npy`` file, read-only and memory-mapped."""
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
