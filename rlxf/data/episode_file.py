"""Reader of episodes in Minari's HDF5 files, piece by piece, with checks of links, shapes and dtypes."""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import h5py
import numpy as np
from gymnasium import spaces
from minari.dataset.minari_storage import is_image_space
from numpy.typing import NDArray
from PIL import Image

from rlxf.data.dataset_source import Source
from rlxf.data.dataset_validation import DAMAGE, raise_if_inaccessible
from rlxf.data.hdf5_nodes import LocalGroup, chunk_bytes, read_rows
from rlxf.data.spaces import is_text, parts_of
from rlxf.utils.errors import DatasetError
from rlxf.utils.memory_budget import MemoryBudgetError, check_budget

END_FLAGS = ("terminations", "truncations")
ARRAY_NAMES = ("observations", "actions", "rewards", *END_FLAGS)
"""Names of the arrays that are read from an episode."""
SUM_TOLERANCE = 1e-3
"""Allowed error of a stated sum of rewards, relative to 1 plus the sum of their absolute values.

Writers may sum in float32. Its rounding errors grow with the rewards, also if these cancel.
"""


class EpisodeFile:
    """Context manager that opens the HDF5 file of a source for reading.

    Every method raises DatasetError, with the name of the file, if data are missing or damaged, require more
    memory than the budget, or cannot be read at present.

    Args:
        source: source of the file.
    """

    def __init__(self, source: Source):
        self.source = source

    def __enter__(self) -> "EpisodeFile":
        with self._error_context():
            self._file = h5py.File(self.source.file, "r")
            self._opened: tuple[int, LocalGroup] | None = None
            self._size = self.source.file.stat().st_size
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def lengths(self) -> list[int]:
        """Return the number of steps of each selected episode, and check arrays and totals of the file.

        All arrays of an episode must have its length T; observations have T + 1 rows. If the file states the
        number of steps, it must be T. Without a selection, the numbers of episodes and steps must be those of
        the metadata.
        """
        lengths = [self._length(episode) for episode in self.source.episodes]
        metadata = self.source.metadata
        with self._error_context():
            groups = len(self._file)
        expected = metadata["total_episodes"], metadata["total_steps"]
        if self.source.selected is None and (groups, sum(lengths)) != expected:
            raise self._damaged(
                f"it has {groups} episodes with {sum(lengths)} steps in total, but the metadata state "
                f"{expected[0]} episodes with {expected[1]} steps"
            )
        return lengths

    def _length(self, episode: int) -> int:
        with self._group(episode) as group:
            arrays = [(name, array) for name in ARRAY_NAMES for array in group.arrays(name)]
            steps = len(group["rewards"])
            counts = [(name, len(array)) for name, array in arrays]
            stated = int(group.number("total_steps", steps))
        self._check_counts(counts, steps, stated, episode)
        self._check_form(group, [array for _, array in arrays], episode)
        return steps

    def _check_counts(self, counts: Sequence[tuple[str, int]], steps: int, stated: int, episode: int) -> None:
        """Raise DatasetError if arrays have another number of rows than an episode with these steps.

        Args:
            counts: name and number of rows of each array.
            steps: number of rewards.
            stated: number of steps that the file states.
            episode: index of the episode.
        """
        if not steps:
            raise self._damaged("it has no steps", episode)
        if stated == steps and all(rows == steps for _, rows in counts):
            raise self._mistake(
                f"it has {steps} steps and as many observations, but an episode of T steps has T + 1 "
                f"observations",
                "append the observation after the last action to each episode, or the last observation again "
                "if it was not recorded",
                episode,
            )
        faults = [
            f"{rows} rows of {name}" for name, rows in counts if rows != steps + (name == "observations")
        ]
        faults += [f"total_steps is {stated}"] * (stated != steps)
        if faults:
            raise self._damaged(f"it has {steps} rewards, but {', '.join(faults)}", episode)

    def _check_form(self, group: LocalGroup, arrays: Sequence[h5py.Dataset], episode: int) -> None:
        """Raise DatasetError if shapes or dtypes differ from the metadata, or chunks exceed the budget."""
        with self._error_context(episode):
            fault = _episode_mismatch(group, self.source)
        if fault:
            raise self._mistake(fault, "convert its arrays or correct its spaces", episode)
        with self._error_context(episode):
            check_budget({"a chunk of an array": max(map(chunk_bytes, arrays))}, self._size)

    def rewards(self, episode: int) -> NDArray[np.float64]:
        """Return the rewards of an episode, (T,); check their sum if the file has ``rewards_sum``."""
        with self._group(episode) as group:
            rewards = np.asarray(_read_all(group["rewards"]), np.float64).reshape(-1)
            stated = float(group.number("rewards_sum", np.nan))
        total = rewards.sum()
        tolerance = SUM_TOLERANCE * (1 + np.abs(rewards).sum())
        if np.isfinite(stated + total) and abs(total - stated) > tolerance:
            raise self._damaged(f"its rewards sum to {total}, but rewards_sum is {stated}", episode)
        return rewards

    def ending(self, episode: int) -> tuple[bool, bool]:
        """Return the terminated and truncated flags of the last step; the earlier flags must be False."""
        with self._group(episode) as group:
            ends = [_read_all(group[name]).reshape(-1).astype(bool) for name in END_FLAGS]
        for name, each in zip(END_FLAGS, ends, strict=True):
            if each[:-1].any():
                raise self._mistake(
                    f"its {name} are True at step {int(np.argmax(each))} of {len(each)}, before the last, "
                    f"but an episode ends at its first flag",
                    "split the episode after each flag",
                    episode,
                )
        return bool(ends[0][-1]), bool(ends[1][-1])

    def observations(self, episode: int, start: int, stop: int) -> Any:
        """Return the observations of these steps: arrays (n, ...), nested like the space; None for text."""
        source = self.source
        steps = slice(start, stop)
        with self._group(episode) as group:
            node = group["observations"]
            return _read(node, source.observation_space, steps, self._decode if source.has_jpeg else None)

    def _decode(self, array: h5py.Dataset, steps: slice, space: spaces.Space[Any]) -> NDArray[np.uint8]:
        """Read JPEG images of the space. Other formats are rejected: Pillow may run programs for them."""
        return np.stack([_decode_frame(frame, space) for frame in _encoded_frames(array, steps, self._size)])

    def actions(self, episode: int, start: int, stop: int) -> Any:
        """Return the actions of these steps, (n, ...)."""
        with self._group(episode) as group:
            return read_rows(group["actions"], start, stop)

    @contextmanager
    def _group(self, episode: int) -> Iterator[LocalGroup]:
        """Yield the group of an episode, which stays open until another one is opened."""
        with self._error_context(episode):
            if self._opened is None or self._opened[0] != episode:
                self._opened = episode, LocalGroup(self._file)[f"episode_{episode}"]
            yield self._opened[1]

    @contextmanager
    def _error_context(self, episode: int | None = None) -> Iterator[None]:
        try:
            yield
        except MemoryBudgetError as error:
            raise DatasetError(f"{self._place(episode)}: {error}") from error
        except DAMAGE as error:
            raise_if_inaccessible(self.source.file, error)
            raise self._damaged(str(error), episode) from error

    def _place(self, episode: int | None) -> str:
        return f"{self.source.file}" if episode is None else f"{self.source.file}, episode {episode}"

    def _mistake(self, fault: str, remedy: str, episode: int) -> DatasetError:
        """Return the error for arrays that the author of a dataset may have recorded in this way.

        Minari writes such files without an error: it does not compare the arrays of a buffer with the spaces,
        or with each other.
        """
        return DatasetError(
            f"{self._place(episode)}: {fault}. If you created {self.source.id}, {remedy}, and create it "
            f"again after minari delete {self.source.id}; otherwise the file is altered: download it again"
        )

    def _damaged(self, fault: str, episode: int | None = None) -> DatasetError:
        return DatasetError(
            f"{self._place(episode)}: the file is truncated or altered ({fault}); delete it, then download "
            f"or record {self.source.id} again"
        )


_Decode = Callable[[h5py.Dataset, slice, spaces.Space[Any]], NDArray[np.uint8]]


def _read(node: Any, space: spaces.Space[Any], steps: slice, decode: _Decode | None) -> Any:
    """Read these steps as arrays, nested like the space; None for text.

    Args:
        node: group or array of the space.
        space: the space.
        steps: the steps.
        decode: function that reads images; None if they are stored as arrays.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = _stored_parts(space).items()
        values = {name: _read(node[name], part, steps, decode) for name, part in parts}
        return values if isinstance(space, spaces.Dict) else tuple(values.values())
    if is_text(space):
        return None
    if decode and is_image_space(space):
        return decode(node, steps, space)
    return read_rows(node, steps.start, steps.stop)


def _read_all(array: h5py.Dataset) -> NDArray[Any]:
    return read_rows(array, 0, len(array))


def _stored_parts(space: spaces.Dict | spaces.Tuple) -> dict[str, spaces.Space[Any]]:
    """Return the parts of a space by their names in the file."""
    keyed = isinstance(space, spaces.Dict)
    return {key if keyed else f"_index_{key}": part for key, part in parts_of(space).items()}


def _encoded_frames(array: h5py.Dataset, steps: slice, file_bytes: int) -> Iterator[bytes]:
    """Yield the encoded images of these steps, one at a time if their sizes differ.

    Rows of variable length can refer to the same bytes of the file, and fill values are not in the file. The
    sum of all sizes is therefore compared with the memory budget.

    Raises:
        MemoryBudgetError: if the images require more than the budget.
    """
    rows = range(len(array))[steps]
    size = len(rows) * math.prod(array.shape[1:]) * array.dtype.itemsize
    check_budget({"encoded images": size}, file_bytes)
    if h5py.check_vlen_dtype(array.dtype) is None:
        yield from (frame.tobytes() for frame in array[steps])
        return
    for row in rows:
        frame = array[row]
        size += frame.nbytes
        check_budget({"encoded images": size}, file_bytes)
        yield frame.tobytes()


def _decode_frame(frame: bytes, space: spaces.Space[Any]) -> NDArray[np.uint8]:
    """Decode an image after comparing its size with the space."""
    with Image.open(io.BytesIO(frame), formats=["JPEG"]) as image:
        numbers = image.height * image.width * len(image.getbands())
        if numbers != math.prod(space.shape or ()):
            raise ValueError(f"an image has {image.height} x {image.width} pixels, its space is {space}")
        return np.asarray(image).reshape(space.shape or ())


def _episode_mismatch(group: LocalGroup, source: Source) -> str | None:
    """Describe an array of an episode whose shape or dtype differs from the metadata; None if all match."""
    faults = {
        "observations": _array_mismatch(group["observations"], source.observation_space, source.has_jpeg),
        "actions": _array_mismatch(group["actions"], source.action_space, jpeg=False),
        **{name: _scalar_mismatch(group[name]) for name in ("rewards", *END_FLAGS)},
    }
    return next((f"{name} {fault}" for name, fault in faults.items() if fault), None)


def _array_mismatch(node: Any, space: spaces.Space[Any], jpeg: bool) -> str | None:
    """Describe how the rows of an array differ from a space in shape or dtype; None if they do not.

    Args:
        node: a group for a Dict or a Tuple, else an array (rows, ...).
        space: space of one row. Another dtype is allowed if ``numpy.can_cast`` permits it ("same_kind").
        jpeg: True if images are stored as JPEG.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = _stored_parts(space).items()
        faults = ((name, _array_mismatch(node[name], part, jpeg)) for name, part in parts)
        return next((f"{name!r} {fault}" for name, fault in faults if fault), None)
    if is_text(space) or (jpeg and is_image_space(space)):
        return None
    return _array_fault(node, space)


def _array_fault(array: h5py.Dataset, space: spaces.Space[Any]) -> str | None:
    rows, dtype = array.shape[1:], array.dtype  # h5py builds both for each access
    is_choice = isinstance(space, spaces.Discrete) and rows == (1,)
    if rows != space.shape and not is_choice:
        return f"have rows of shape {rows}, but the metadata state {space.shape} ({space})"
    if dtype.kind not in "biuf" or not _castable(dtype, space.dtype):
        return f"are of {dtype}, but the metadata state {space.dtype} ({space})"
    return None


def _castable(stored: np.dtype[Any], expected: Any) -> bool:
    """Return whether a cast is allowed; integers of all widths are, since values are checked separately."""
    both_integers = stored.kind in "biu" and expected.kind in "biu"
    return both_integers or bool(np.can_cast(stored, expected, "same_kind"))


def _scalar_mismatch(array: h5py.Dataset) -> str | None:
    """Describe why an array does not have a single number per step; None if it does."""
    numbers = math.prod(array.shape[1:])
    if numbers != 1 or array.dtype.kind not in "biuf":
        return f"are of {array.dtype} with rows of shape {array.shape[1:]}, not a single number per step"
    return None
