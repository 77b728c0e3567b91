"""Conversion of a Minari dataset to flat arrays, with returns-to-go and statistics of observations."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, DTypeLike, NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlxf.data.array_file import ArrayFile
from rlxf.data.dataset_source import Source
from rlxf.data.encoders import Encoder, VectorEncoder, action_encoder, observation_encoder
from rlxf.data.episode_file import EpisodeFile
from rlxf.data.errors import DatasetError, RowError
from rlxf.utils.memory_budget import FILE_SHARE, MemoryBudgetError, check_budget


def return_to_go(rewards: ArrayLike) -> NDArray[np.float64]:
    """Compute ``R_t = r_t + r_(t+1) + ... + r_(T-1)`` for the rewards (T,) of an episode, in float64.

    There is no discount.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3.
    """
    return np.cumsum(np.asarray(rewards, np.float64)[::-1])[::-1]


SMALLEST_STD = 1e-6


class RunningStats:
    """Running mean and population standard deviation per column, in float64.

    Pieces are combined by ``M2 = M2_a + M2_b + (mean_b - mean_a)^2 n_a n_b / (n_a + n_b)``, where M2 is the
    sum of squared deviations from the mean. Columns far from zero therefore lose no precision.

    Source: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance".

    Args:
        columns: number of columns D.
    """

    def __init__(self, columns: int):
        self._count = 0
        self._mean = np.zeros(columns)
        self._squares = np.zeros(columns)

    def add(self, rows: NDArray[np.floating]) -> None:
        """Add rows (n, D), n at least 1."""
        rows = rows.astype(np.float64)
        count, mean = len(rows), rows.mean(axis=0)
        total = self._count + count
        shift = mean - self._mean
        self._squares += ((rows - mean) ** 2).sum(axis=0) + shift**2 * (self._count * count / total)
        self._mean += shift * (count / total)
        self._count = total

    @property
    def mean(self) -> NDArray[np.float32]:
        """Mean of the columns, (D,)."""
        return self._mean.astype(np.float32)

    @property
    def std(self) -> NDArray[np.float32]:
        """Population standard deviation of the columns, (D,); 1 for constant columns (below 1e-6).

        The reference implementation of Decision Transformer adds 1e-6 instead, which scales any deviation
        from a constant by a million.
        """
        std = np.sqrt(self._squares / self._count)
        return np.where(std < SMALLEST_STD, 1.0, std).astype(np.float32)


PIECE_BYTES = 2**23
"""Bytes of an episode that are held in memory at once."""
STEP_BYTES = 32
"""Bytes of memory per step of an episode in addition to its pieces: rewards, returns and temporaries."""
RATIO = 100
"""Largest ratio of the size of the arrays to the size of the file, in addition to the memory budget."""
ACTION_TOLERANCE = 1e-4
"""Tolerance for rounding of actions outside of their Box, as a fraction of max(1, |bound|)."""


def convert(sources: Sequence[Source], folder: Path, progress_bar: bool = False) -> list[ArrayFile]:
    """Write each array of `Trajectories` to a file in an empty folder; return the files.

    Raises:
        DatasetError: if a file is truncated or altered, or a value is NaN, infinite or outside of its space.
            The message names the file, or episode and step.
        TypeError: if a space is not supported.
        OSError: if the disk is full.
    """
    with ExitStack() as stack:
        progress = stack.enter_context(_bar(progress_bar))
        files = [stack.enter_context(EpisodeFile(source)) for source in sources]
        lengths = [_lengths(file) for file in files]
        arrays = _Arrays(folder, sources[0], sum(map(sum, lengths)), stack, _file_bytes(sources))
        task = progress.add_task("convert", total=arrays.steps)
        for file, steps in zip(files, lengths, strict=True):
            for episode, length in zip(file.source.episodes, steps, strict=True):
                arrays.add(file, episode, length)
                progress.advance(task, length)
        arrays.finish()
    return arrays.files


def _lengths(file: EpisodeFile) -> list[int]:
    lengths = [file.length(episode) for episode in file.source.episodes]
    file.check_totals(lengths)
    size = file.source.file.stat().st_size
    with _as_dataset_error(file.source.id):
        check_budget({"the rewards of its longest episode": STEP_BYTES * max(lengths)}, size)
    return lengths


def _file_bytes(sources: Sequence[Source]) -> int:
    return sum(source.file.stat().st_size for source in sources)


@contextmanager
def _as_dataset_error(name: str) -> Iterator[None]:
    try:
        yield
    except MemoryBudgetError as error:
        raise DatasetError(f"dataset {name} is not converted: {error}") from error


class _Arrays:
    """Writer of the arrays of a dataset; the exit stack closes its files."""

    def __init__(self, folder: Path, source: Source, steps: int, stack: ExitStack, file_bytes: int):
        self.folder, self.steps, self._stack = folder, steps, stack
        self.files: list[ArrayFile] = []
        self._observe = observation_encoder(source.observation_space)
        self._act = _with_bounds_check(action_encoder(source.action_space), source.action_space)
        self._check_size(source, file_bytes)
        self._moments = (
            RunningStats(self._observe.shape[0]) if isinstance(self._observe, VectorEncoder) else None
        )
        self._observations = self._new("observations", (steps, *self._observe.shape), self._observe.dtype)
        self._actions = self._new("actions", (steps, *self._act.shape), self._act.dtype)
        self._rewards = self._new("rewards", (steps,), np.float32)
        self._return_to_go = self._new("return_to_go", (steps,), np.float32)
        self._offsets = [0]
        self._endings: list[tuple[bool, bool]] = []

    def _check_size(self, source: Source, file_bytes: int) -> None:
        """Raise DatasetError before writing if the arrays would be far larger than the compressed files."""
        row = sum(map(_row_bytes, (self._observe, self._act)))
        with _as_dataset_error(source.id):
            check_budget({"one step": 8 * row}, file_bytes)
            check_budget({"its converted arrays": self.steps * (row + 8)}, RATIO * file_bytes // FILE_SHARE)

    def add(self, file: EpisodeFile, episode: int, length: int) -> None:
        """Append an episode."""
        where = f"dataset {file.source.id}, episode {episode}"
        rewards = file.rewards(episode)
        _check_rewards(rewards, f"{where}: the reward")
        self._rewards.append(rewards)
        self._return_to_go.append(return_to_go(rewards))
        read = partial(file.observations, episode)
        observe = observation_encoder(file.source.observation_space)  # its image channel axis may differ
        for rows in _pieces(read, observe, length, f"{where}: the observation"):
            self._add_observations(rows)
        for rows in _pieces(partial(file.actions, episode), self._act, length, f"{where}: the action"):
            self._actions.append(rows)
        self._offsets.append(self._offsets[-1] + length)
        self._endings.append(file.ending(episode))

    def _add_observations(self, rows: NDArray[Any]) -> None:
        self._observations.append(rows)
        if self._moments is not None:
            self._moments.add(rows)

    def finish(self) -> None:
        """Write the arrays that are known only after the last episode."""
        terminated, truncated = np.array(self._endings, bool).T
        self._write("offsets", np.array(self._offsets, np.int64))
        self._write("terminated", terminated)
        self._write("truncated", truncated)
        if self._moments is not None:
            self._write("observation_mean", self._moments.mean)
            self._write("observation_std", self._moments.std)

    def _write(self, name: str, array: NDArray[Any]) -> None:
        self._new(name, array.shape, array.dtype).append(array)

    def _new(self, name: str, shape: tuple[int, ...], dtype: Any) -> ArrayFile:
        file = self._stack.enter_context(ArrayFile(self.folder / f"{name}.npy", shape, dtype))
        self.files.append(file)
        return file


@dataclass(frozen=True)
class _InBox:
    """Encoder of Box actions that rejects actions outside of the Box."""

    encode: VectorEncoder
    space: spaces.Box[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self.encode.shape

    @property
    def dtype(self) -> DTypeLike:
        """Dtype of a row."""
        return self.encode.dtype

    def __call__(self, values: Any) -> NDArray[np.float32]:
        """Encode actions as `VectorEncoder` does; raise RowError also if an action is outside of the Box."""
        rows = self.encode(values)
        low, high = self.space.low.ravel(), self.space.high.ravel()
        inside = ((rows >= low - _tolerance(low)) & (rows <= high + _tolerance(high))).all(axis=1)
        if not inside.all():
            row = int(np.argmin(inside))
            raise RowError(row, f"is {rows[row].tolist()}, outside of {self.space}")
        return rows


def _tolerance(bound: NDArray[Any]) -> NDArray[np.float64]:
    return ACTION_TOLERANCE * np.maximum(1.0, np.abs(np.where(np.isfinite(bound), bound, 0.0)))


def _with_bounds_check(encode: Encoder, space: spaces.Space[Any]) -> Encoder:
    """Return an encoder that also rejects Box actions outside of their space; others always do."""
    is_box = isinstance(space, spaces.Box) and isinstance(encode, VectorEncoder)
    return _InBox(encode, space) if is_box else encode  # type: ignore[arg-type]


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


def _check_rewards(rewards: NDArray[np.float64], what: str) -> None:
    with np.errstate(over="ignore"):
        finite = np.isfinite(rewards.astype(np.float32))
    if not finite.all():
        step = int(np.argmin(finite))
        raise _bad_value(what, step, f"is {rewards[step]}")


def _bad_value(what: str, step: int, fault: str) -> DatasetError:
    return DatasetError(
        f"{what} of step {step} {fault}; correct the data, or leave the episode out with "
        f"MinariDataset.filter_episodes"
    )


def _bar(visible: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, disable=not visible)
