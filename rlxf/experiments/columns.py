"""Columns of numbers in untrusted CSV and NPZ files: bounded size, and errors with file and line."""

import csv
import math
import zipfile
from array import array
from collections.abc import Iterator, Sequence
from io import BytesIO, TextIOWrapper
from pathlib import Path
from reprlib import repr as short_repr

import numpy as np
from numpy.typing import NDArray

from rlxf.utils.files import MAX_LOG_BYTES
from rlxf.utils.tables import printable
from rlxf.utils.warnings import warn_user

LARGEST_STEP = 1e18
LARGEST_VALUE = 1e100
"""Largest absolute value, so that sums and squares of values are finite."""
MAX_RECORD = 2**20
"""Largest number of characters in a line of a CSV file; one of 64 MiB would take gigabytes as fields."""
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Compression methods of NumPy. The other ones of zip files decompress a member as a whole."""
Points = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Steps (n,) and values (n,), in the order of the file. All are finite."""


def trailing_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Return the mean of each value and the ones before it, at most ``window`` values, (n,) -> (n,).

    A window that begins in a block of ``window`` values ends in the next one. Its sum is that of the end of
    the first block and the start of the second one. Without differences of cumulative sums, a large value, or
    one that is NaN, affects the windows that contain it only.

    Source: van Herk 1992, "A fast algorithm for local minimum and maximum filters on rectangular and
    octagonal kernels", with sums in place of minima.
    """
    size, count = min(window, len(values)) or 1, len(values)
    blocks = np.zeros((-(-count // size) + 2, size))
    blocks.ravel()[size - 1 : size - 1 + count] = values  # the zeros before the first value add nothing
    ends = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1]
    starts = np.zeros_like(blocks)
    starts[:, 1:] = np.cumsum(blocks[:, :-1], axis=1)
    sums = ends.ravel()[:count] + starts.ravel()[size : size + count]
    means: NDArray[np.float64] = sums / np.minimum(np.arange(1, count + 1), size)
    return means


def listed(names: Sequence[str], most: int = 12) -> str:
    """Return names as one line of text; of many names, the first ones and the number of the others."""
    shown = ", ".join(printable(name[:60]).replace("\n", "\\n") for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def header_of(path: Path, data: bytes) -> list[str]:
    """Return the names of the columns of a CSV text.

    Raises:
        ValueError: if the header of the file at ``path`` is no CSV.
    """
    try:
        return next(_Records(data.partition(b"\n")[0]), [])
    except csv.Error as error:
        raise ValueError(f"{path} line 1: {error}; restore the file") from error


class _Records(Iterator[list[str]]):
    """Fields of each record of a CSV text.

    Args:
        data: the text.

    Attributes:
        line: number of lines that were read.

    Raises:
        csv.Error: from ``next``, if a record is damaged, or has more than `MAX_RECORD` characters.
    """

    def __init__(self, data: bytes):
        self._text = TextIOWrapper(BytesIO(data), "utf-8-sig", errors="replace", newline="")
        self._reader = csv.reader(self._lines())
        self._length = self.line = 0

    def __next__(self) -> list[str]:
        self._length = 0
        return next(self._reader)

    def _lines(self) -> Iterator[str]:
        while line := self._text.readline(MAX_RECORD + 1):
            self.line += 1
            self._length += len(line)
            if self._length > MAX_RECORD:
                raise csv.Error(f"more than {MAX_RECORD:,} characters")
            yield line


def read_columns(
    path: Path, data: bytes, first_line: int, columns: Sequence[str], optional: str | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return columns of a CSV text, as line numbers (n,) and a table (n, columns).

    Args:
        path: the file, for errors.
        data: the text, which begins with a header.
        first_line: line number of the header.
        columns: names of the columns.
        optional: column whose empty fields exclude their row.

    Raises:
        ValueError: if a column is missing or occurs twice, a line has too many or too few fields, or a field
            is not a number.
    """
    reader = _Records(data)
    lines, numbers = array("q"), array("d")
    try:
        names = next(reader, [])
        places = {name: _place(path, names, name) for name in columns}
        for row in reader:
            if row and not (optional and row[places[optional] : places[optional] + 1] == [""]):
                line = first_line - 1 + reader.line
                _check_width(path, line, row, names)
                lines.append(line)
                numbers.extend(_number(path, line, name, row[place]) for name, place in places.items())
    except csv.Error as error:
        raise ValueError(f"{path} line {first_line - 1 + reader.line}: {error}; restore the file") from error
    table = np.array(numbers, np.float64).reshape(-1, len(columns))
    return np.array(lines, np.int64), table


def _place(path: Path, names: Sequence[str], name: str) -> int:
    if names.count(name) != 1:
        raise ValueError(f"{path} must have one column {name}, got {listed(names)}")
    return names.index(name)


def _check_width(path: Path, line: int, row: Sequence[str], names: Sequence[str]) -> None:
    if len(row) != len(names):
        raise ValueError(
            f"{path} line {line} has {len(row)} fields instead of {len(names)}; restore the file"
        )


def _number(path: Path, line: int, name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{path} line {line}: {name} must be a number, got {short_repr(text)}") from None


def without_gaps(
    path: Path,
    metric: str,
    places: NDArray[np.int64],
    steps: NDArray[np.float64],
    values: NDArray[np.float64],
    kind: str = "line",
) -> Points:
    """Return the points with finite values, and warn of the others with the place of the first one.

    Absolute values above `LARGEST_VALUE` count as infinite.
    """
    finite = np.abs(values) <= LARGEST_VALUE
    if not finite.all():
        first, count = int(np.argmin(finite)), int((~finite).sum())
        warn_user(
            f"{path} {kind} {places[first]}: {metric} is {values[first]:g}; {count} such value"
            f"{'s are' if count > 1 else ' is'} left out"
        )
    return steps[finite], values[finite]


def read_arrays(archive: zipfile.ZipFile, names: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    """Return those arrays of an NPZ file that exist.

    Raises:
        ValueError: if they exceed `MAX_LOG_BYTES`, are not numeric, or are damaged.
    """
    members = {name: f"{name}.npy" for name in names if f"{name}.npy" in archive.namelist()}
    infos = [archive.getinfo(member) for member in members.values()]
    if sum(info.file_size for info in infos) > MAX_LOG_BYTES:
        raise ValueError(f"its arrays exceed {MAX_LOG_BYTES:,} bytes")
    if any(info.compress_type not in METHODS for info in infos):
        raise ValueError("its arrays are compressed by another method than that of NumPy")
    return {name: _read_array(archive.read(member)) for name, member in members.items()}


def _read_array(data: bytes) -> NDArray[np.float64]:
    """Parse an NPY file. Its header must describe as many bytes as follow, because NumPy allocates them."""
    stream = BytesIO(data)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(stream)
    if version not in readers:
        raise ValueError(f"an array has the format version {version}")
    try:
        shape, _, dtype = readers[version](stream)
    except Exception as error:  # the parser of NumPy raises errors of Python's tokenizer and parser, too
        raise ValueError(f"an array has a damaged header ({type(error).__name__})") from error
    if dtype.kind not in "biuf" or math.prod(shape) * dtype.itemsize != len(data) - stream.tell():
        raise ValueError(f"an array has the type {dtype} and the shape {shape}, which its data do not fit")
    return np.load(BytesIO(data), allow_pickle=False).astype(np.float64)
