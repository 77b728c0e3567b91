"""Reader of episodes in Minari's HDF5 files, piece by piece."""

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
from rlxf.data.hdf5_checks import ENDS, chunk_bytes, episode_mismatch, local_arrays, open_local_node
from rlxf.data.spaces import is_text, parts_of
from rlxf.utils.errors import DatasetError
from rlxf.utils.memory_budget import MemoryBudgetError, check_budget

READ = ("observations", "actions", "rewards", *ENDS)
"""Names of the arrays that are read from an episode."""
ReadImages = Callable[[Any, spaces.Space[Any]], Any]
"""Function that decodes a few steps of stored images of a space into arrays."""
# Exceptions of h5py for damaged files: OSError and RuntimeError by its own checks, KeyError for missing
# names, and the others for damaged types and sizes.
_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, IndexError, MemoryError)


class EpisodeFile:
    """Context manager that opens the HDF5 file of a source for reading.

    Every method raises DatasetError, with the name of the file, if data are missing or damaged.

    Args:
        source: source of the file.
    """

    def __init__(self, source: Source):
        self.source = source
        self._read_image = _decode if source.has_jpeg else _as_stored

    def __enter__(self) -> "EpisodeFile":
        with self._error_context():
            self._file = h5py.File(self.source.file, "r")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def length(self, episode: int) -> int:
        """Return the number of steps T of an episode, and check that all of its arrays have that length.

        Observations have T + 1 rows. If the file states the number of steps, it must be T.
        """
        with self._error_context(episode):
            group = self._group(episode)
            arrays = [(name, array) for name in READ for array in local_arrays(group, name)]
            steps = len(group["rewards"])
            counts = [(name, len(array)) for name, array in arrays]
            stated = int(group.attrs.get("total_steps", steps))
        faults = [f"{rows} rows of {name}" for name, rows in counts if rows != steps + (name == READ[0])]
        faults += [f"total_steps is {stated}"] * (stated != steps) + ["no step"] * (not steps)
        if faults:
            raise self._damaged(f"it has {steps} rewards, but {', '.join(faults)}", episode)
        self._check_form(group, [array for _, array in arrays], episode)
        return steps

    def _check_form(self, group: Any, arrays: Sequence[h5py.Dataset], episode: int) -> None:
        """Raise DatasetError if shapes or dtypes differ from the metadata, or chunks exceed the memory."""
        with self._error_context(episode):
            fault = episode_mismatch(group, self.source)
        if fault:
            raise self._damaged(fault, episode)
        chunk = max(map(chunk_bytes, arrays))
        try:
            check_budget({"a chunk of an array": chunk}, self.source.file.stat().st_size)
        except MemoryBudgetError as error:
            raise DatasetError(f"{self.source.file}, episode {episode}: {error}") from error

    def rewards(self, episode: int) -> NDArray[np.float64]:
        """Return the rewards of an episode, (T,)."""
        with self._error_context(episode):
            group = self._group(episode)
            rewards = np.asarray(open_local_node(group, "rewards")[()], np.float64).reshape(-1)
            stated = float(group.attrs.get("rewards_sum", np.nan))
        total = rewards.sum()
        if np.isfinite(stated + total) and not np.isclose(total, stated, rtol=1e-3, atol=1e-3):
            raise self._damaged(f"its rewards sum to {total}, but rewards_sum is {stated}", episode)
        return rewards

    def ending(self, episode: int) -> tuple[bool, bool]:
        """Return the terminated and truncated flags of the last step; the earlier flags must be False."""
        with self._error_context(episode):
            group = self._group(episode)
            ends = [np.asarray(open_local_node(group, name)[()]).reshape(-1).astype(bool) for name in ENDS]
        for name, each in zip(ENDS, ends, strict=True):
            if each[:-1].any():
                raise self._damaged(
                    f"its {name} are True at step {int(np.argmax(each))} of {len(each)}, before the last",
                    episode,
                )
        return bool(ends[0][-1]), bool(ends[1][-1])

    def observations(self, episode: int, start: int, stop: int) -> Any:
        """Return the observations of these steps: arrays (n, ...), nested like the space; None for text."""
        with self._error_context(episode):
            node, space = open_local_node(self._group(episode), "observations"), self.source.observation_space
            return _read(node, space, slice(start, stop), self._read_image)

    def actions(self, episode: int, start: int, stop: int) -> Any:
        """Return the actions of these steps, (n, ...)."""
        with self._error_context(episode):
            return open_local_node(self._group(episode), "actions")[start:stop]

    def check_totals(self, lengths: list[int]) -> None:
        """Raise DatasetError if the numbers of episodes and steps differ from the metadata.

        A selection of episodes is not checked.
        """
        metadata = self.source.metadata
        with self._error_context():
            groups = len(self._file)
        expected = metadata["total_episodes"], metadata["total_steps"]
        if self.source.selected is None and (groups, sum(lengths)) != expected:
            raise self._damaged(
                f"it has {groups} episodes of {sum(lengths)} steps, the metadata say {expected[0]} of "
                f"{expected[1]}"
            )

    def _group(self, episode: int) -> Any:
        return open_local_node(self._file, f"episode_{episode}")

    @contextmanager
    def _error_context(self, episode: int | None = None) -> Iterator[None]:
        try:
            yield
        except _DAMAGE as error:
            raise self._damaged(str(error), episode) from error

    def _damaged(self, fault: str, episode: int | None = None) -> DatasetError:
        part = "" if episode is None else f", episode {episode}"
        return DatasetError(
            f"{self.source.file}{part}: the file is truncated or altered ({fault}); delete it, then download "
            f"or record {self.source.id} again"
        )


def _read(node: Any, space: spaces.Space[Any], steps: slice, read_image: ReadImages) -> Any:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = parts_of(space).items()
        keyed = isinstance(space, spaces.Dict)
        values = {
            key: _read(open_local_node(node, key if keyed else f"_index_{key}"), part, steps, read_image)
            for key, part in parts
        }
        return values if keyed else tuple(values.values())
    if is_text(space):
        return None
    return read_image(node[steps], space) if is_image_space(space) else node[steps]


def _decode(frames: Any, space: spaces.Space[Any]) -> NDArray[np.uint8]:
    """Decode frames, each a JPEG image. Other formats are rejected: Pillow may run programs for them."""
    return np.stack([_decode_frame(frame.tobytes(), space) for frame in frames])


def _decode_frame(frame: bytes, space: spaces.Space[Any]) -> NDArray[np.uint8]:
    """Decode an image after comparing its size with the space."""
    with Image.open(io.BytesIO(frame), formats=["JPEG"]) as image:
        numbers = image.height * image.width * len(image.getbands())
        if numbers != math.prod(space.shape or ()):
            raise ValueError(f"an image has {image.height} x {image.width} pixels, its space is {space}")
        return np.asarray(image).reshape(space.shape or ())


def _as_stored(images: Any, space: spaces.Space[Any]) -> Any:
    return images
