"""Conversion of Minari datasets to flat arrays on the disk, which are read as memory maps."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from rlxf.data.dataset_source import Source
from rlxf.data.encoders import (
    DiscreteEncoder,
    Encoder,
    VectorEncoder,
    action_encoder,
    observation_encoder,
)
from rlxf.data.episode_file import EpisodeFile
from rlxf.data.running_stats import add_observations, observation_stats
from rlxf.data.spaces import check_rows_inside, discrete_sizes, tolerant_bounds
from rlxf.data.trajectories import return_to_go
from rlxf.utils.errors import DatasetError, RowError
from rlxf.utils.files import sync_file
from rlxf.utils.memory_budget import BUDGET_PER_FILE_BYTE, MemoryBudgetError, check_budget
from rlxf.utils.tables import counting_bar


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
                sync_file(self._handle)

    def write(self, data: Any) -> None:
        """Append bytes. NumPy also calls this method to write the header."""
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


PIECE_BYTES = 2**23
"""Maximum size, in bytes, of the encoded part of an episode that is in memory at once."""
STEP_BYTES = 32
"""Bytes of memory per step of an episode in addition to its pieces: rewards, returns and temporaries."""
MAX_EXPANSION = 100
"""Largest ratio of the size of the arrays to the size of the file, in addition to the memory budget."""


def convert(sources: Sequence[Source], folder: Path, progress_bar: bool = False) -> list[ArrayFile]:
    """Write each array of `Trajectories` to a file in an empty folder; return the files.

    Raises:
        DatasetError: if a file is truncated or altered, the arrays would be far larger than the files, or a
            value is NaN, infinite or outside of its space. The message names the file, or episode and step.
        TypeError: if a space is not supported.
        OSError: if the disk is full.
    """
    with ExitStack() as stack:
        progress = stack.enter_context(counting_bar(progress_bar))
        files = [stack.enter_context(EpisodeFile(source)) for source in sources]
        lengths = [checked_lengths(file) for file in files]
        file_bytes = sum(source.file.stat().st_size for source in sources)
        arrays = _Arrays(folder, sources[0], sum(map(sum, lengths)), stack, file_bytes)
        task = progress.add_task("convert", total=arrays.steps)
        for file, steps in zip(files, lengths, strict=True):
            for episode, length in zip(file.source.episodes, steps, strict=True):
                arrays.add(file, episode, length)
                progress.advance(task, length)
        arrays.finish()
    return arrays.files


def checked_lengths(file: EpisodeFile) -> list[int]:
    """Return the lengths of the episodes of a file, like `EpisodeFile.lengths`.

    Raises:
        DatasetError: also if the rewards of its longest episode exceed the memory budget.
    """
    lengths = file.lengths()
    size = file.source.file.stat().st_size
    with _as_dataset_error(file.source.id):
        check_budget({"the rewards of its longest episode": STEP_BYTES * max(lengths)}, size)
    return lengths


@contextmanager
def _as_dataset_error(name: str) -> Iterator[None]:
    try:
        yield
    except MemoryBudgetError as error:
        raise DatasetError(f"dataset {name} is not read: {error}") from error


BYTES_PER_ACTION = 4 * 128
"""Bytes of the weights of one discrete action in the output layer of a small network, of width 128."""


class _Arrays:
    """Writer of the arrays of a dataset; the exit stack closes its files."""

    def __init__(self, folder: Path, source: Source, steps: int, stack: ExitStack, file_bytes: int):
        self.folder = folder
        self.steps = steps
        self._stack = stack
        self.files: list[ArrayFile] = []
        self._observe = observation_encoder(source.observation_space)
        is_box = isinstance(source.action_space, spaces.Box)
        self._act = (_BoundedEncoder if is_box else action_encoder)(source.action_space)
        self._check_size(source, file_bytes)
        self._moments = observation_stats(self._observe)
        self._observations = self._new("observations", (steps, *self._observe.shape), self._observe.dtype)
        self._actions = self._new("actions", (steps, *self._act.shape), self._act.dtype)
        self._rewards = self._new("rewards", (steps,), np.float32)
        self._return_to_go = self._new("return_to_go", (steps,), np.float32)
        self._offsets = [0]
        self._endings: list[tuple[bool, bool]] = []

    def _check_size(self, source: Source, file_bytes: int) -> None:
        """Raise DatasetError before writing if arrays or weights would be far larger than the files."""
        row = sum(map(_row_bytes, (self._observe, self._act)))
        with _as_dataset_error(source.id):
            check_budget({"one step": 8 * row}, file_bytes)
            choices = self._count_choices()  # only now, because it takes memory for each axis of an action
            check_budget({f"a layer for {choices:,} actions": BYTES_PER_ACTION * choices}, file_bytes)
            check_budget(
                {"its converted arrays": self.steps * (row + 8)},
                MAX_EXPANSION * file_bytes // BUDGET_PER_FILE_BYTE,
            )

    def _count_choices(self) -> int:
        """Return the number of values of discrete actions, over all axes; 0 for other actions."""
        return sum(map(int, discrete_sizes(self._act.space))) if isinstance(self._act, DiscreteEncoder) else 0

    def add(self, file: EpisodeFile, episode: int, length: int) -> None:
        """Append an episode."""
        where = f"dataset {file.source.id}, episode {episode}"
        rewards = file.rewards(episode)
        self._rewards.append(_finite(rewards, f"{where}: the reward"))
        self._return_to_go.append(_finite(return_to_go(rewards), f"{where}: the return-to-go"))
        read = partial(file.observations, episode)
        observe = observation_encoder(file.source.observation_space)  # its image channel axis may differ
        for rows in _pieces(read, observe, length, f"{where}: the observation"):
            self._observations.append(rows)
            if self._moments is not None:
                add_observations(self._moments, rows)
        for rows in _pieces(partial(file.actions, episode), self._act, length, f"{where}: the action"):
            self._actions.append(rows)
        self._offsets.append(self._offsets[-1] + length)
        self._endings.append(file.ending(episode))

    def finish(self) -> None:
        """Write the arrays that are known only after the last episode."""
        terminated, truncated = np.array(self._endings, bool).T
        self._write("offsets", np.array(self._offsets, np.int64))
        self._write("terminated", terminated)
        self._write("truncated", truncated)
        if self._moments is not None:
            shape = self._observe.shape
            self._write("observation_mean", self._moments.mean.astype(np.float32).reshape(shape))
            self._write("observation_std", self._moments.std.reshape(shape))

    def _write(self, name: str, array: NDArray[Any]) -> None:
        self._new(name, array.shape, array.dtype).append(array)

    def _new(self, name: str, shape: tuple[int, ...], dtype: Any) -> ArrayFile:
        file = self._stack.enter_context(ArrayFile(self.folder / f"{name}.npy", shape, dtype))
        self.files.append(file)
        return file


class _BoundedEncoder(VectorEncoder):
    """Encoder of Box actions that rejects actions outside of the Box."""

    def __call__(self, values: Any) -> NDArray[np.float32]:
        """Encode actions as `VectorEncoder` does; raise RowError for an action outside of the Box, too."""
        rows = super().__call__(values)
        space = self.space
        assert isinstance(space, spaces.Box)
        low, high = tolerant_bounds(space)
        check_rows_inside(space, rows, (rows >= low.ravel()) & (rows <= high.ravel()))
        return rows


def _row_bytes(encode: Encoder) -> int:
    return max(1, math.prod(encode.shape) * np.dtype(encode.dtype).itemsize)


def _pieces(
    read: Callable[[int, int], Any], encode: Encoder, length: int, what: str
) -> Iterator[NDArray[Any]]:
    """Yield the encoded rows of an episode in pieces of at most `PIECE_BYTES`."""
    piece = max(1, PIECE_BYTES // _row_bytes(encode))
    for start in range(0, length, piece):
        values = read(start, min(start + piece, length))
        try:
            rows = encode(values)
        except RowError as error:
            raise _bad_value(what, start + error.row, error.fault) from error
        yield rows


def _finite(values: NDArray[np.float64], what: str) -> NDArray[np.float32]:
    """Return the values of the steps as float32; raise DatasetError if one is not finite."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    finite = np.isfinite(rounded)
    if not finite.all():
        step = int(np.argmin(finite))
        raise _bad_value(what, step, f"is {values[step]}, not a finite number in float32")
    return rounded


def _bad_value(what: str, step: int, fault: str) -> DatasetError:
    return DatasetError(
        f"{what} of step {step} {fault}; correct the data, or leave the episode out with "
        f"MinariDataset.filter_episodes"
    )
