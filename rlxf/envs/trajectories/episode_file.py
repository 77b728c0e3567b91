"""Reading episodes from Minari's HDF5 files, piece by piece."""

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

from rlxf.envs.trajectories.errors import DatasetError
from rlxf.envs.trajectories.hdf5_links import open_own
from rlxf.envs.trajectories.parts import is_text
from rlxf.envs.trajectories.source import Source
from rlxf.envs.trajectories.stored_form import (
    ENDS,
    chunk_bytes,
    episode_fault,
    own_arrays,
)
from rlxf.utils.memory_budget import MemoryBudgetError, check_budget

READ = ("observations", "actions", "rewards", *ENDS)
"""Names of the arrays that are read from an episode."""
ReadImages = Callable[[Any, spaces.Space[Any]], Any]
"""Function that decodes a few steps of stored images of a space into arrays."""
# What h5py raises for damaged files: its own checks are OSError and RuntimeError, names that lead to
# nothing are KeyError, and damaged types and sizes are the others.
_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, IndexError, MemoryError)


class EpisodeFile:
    """The HDF5 file of a source, open for reading; a context manager.

    Every method raises DatasetError, with the name of the file, if what it needs is missing or damaged.

    Args:
        source: whose file it is.
    """

    def __init__(self, source: Source):
        self.source = source
        self._read_image = _decode if source.has_jpeg else _as_stored

    def __enter__(self) -> "EpisodeFile":
        with self._naming():
            self._file = h5py.File(self.source.file, "r")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def length(self, episode: int) -> int:
        """Number of steps T, after a look whether all arrays of the episode have that many.

        Observations have T + 1 rows. Where Minari wrote down the number of steps it must agree.
        """
        with self._naming(episode):
            group = self._group(episode)
            arrays = [array for name in READ for array in own_arrays(group, name)]
            steps = len(group["rewards"])
            wanted = {
                "actions": steps,
                "observations": steps + 1,
                "terminations": steps,
                "truncations": steps,
            }
            found = [(name, rows) for name in wanted for rows in _row_counts(open_own(group, name))]
            noted = int(group.attrs.get("total_steps", steps))
        wrong = [f"{rows} rows of {name}" for name, rows in found if rows != wanted[name]]
        wrong += [f"a note of {noted} steps"] * (noted != steps) + ["no step"] * (not steps)
        if wrong:
            raise self._damaged(f"it has {steps} rewards, but {', '.join(wrong)}", episode)
        self._check_form(group, arrays, episode)
        return steps

    def _check_form(self, group: Any, arrays: Sequence[h5py.Dataset], episode: int) -> None:
        """Reject arrays whose shape or dtype differs from the metadata, and chunks that exceed memory."""
        with self._naming(episode):
            fault = episode_fault(group, self.source)
        if fault:
            raise self._damaged(fault, episode)
        chunk = max(map(chunk_bytes, arrays))
        try:
            check_budget({"a chunk of an array": chunk}, self.source.file.stat().st_size)
        except MemoryBudgetError as error:
            raise DatasetError(f"{self.source.file}, episode {episode}: {error}") from error

    def rewards(self, episode: int) -> NDArray[np.float64]:
        """(T,)"""
        with self._naming(episode):
            group = self._group(episode)
            rewards = np.asarray(open_own(group, "rewards")[()], np.float64).reshape(-1)
            noted = float(group.attrs.get("rewards_sum", np.nan))
        total = rewards.sum()
        if np.isfinite(noted + total) and not np.isclose(total, noted, rtol=1e-3, atol=1e-3):
            raise self._damaged(f"its rewards sum to {total}, its note says {noted}", episode)
        return rewards

    def ending(self, episode: int) -> tuple[bool, bool]:
        """Return the terminated and truncated flags of the last step; earlier steps must not be ends."""
        with self._naming(episode):
            group = self._group(episode)
            ends = [np.asarray(open_own(group, name)[()]).reshape(-1).astype(bool) for name in ENDS]
        for name, each in zip(ENDS, ends, strict=True):
            if each[:-1].any():
                raise self._damaged(
                    f"its {name} end it at step {int(np.argmax(each))} of {len(each)}, not at the last",
                    episode,
                )
        return bool(ends[0][-1]), bool(ends[1][-1])

    def observations(self, episode: int, start: int, stop: int) -> Any:
        """Observations of these steps: arrays (n, ...), nested as the space is; None where it is text."""
        with self._naming(episode):
            node, space = open_own(self._group(episode), "observations"), self.source.observation_space
            return _read(node, space, slice(start, stop), self._read_image)

    def actions(self, episode: int, start: int, stop: int) -> Any:
        """Actions of these steps: an array (n, ...)."""
        with self._naming(episode):
            return open_own(self._group(episode), "actions")[start:stop]

    def check_totals(self, lengths: list[int]) -> None:
        """Refuse a whole file whose episodes and steps are not as many as the metadata say."""
        metadata = self.source.metadata
        with self._naming():
            groups = len(self._file)
        wanted = metadata["total_episodes"], metadata["total_steps"]
        if self.source.selected is None and (groups, sum(lengths)) != wanted:
            found = f"{groups} episodes of {sum(lengths)} steps, the metadata say {wanted[0]} of {wanted[1]}"
            raise self._damaged(f"it holds {found}")

    def _group(self, episode: int) -> Any:
        return open_own(self._file, f"episode_{episode}")

    @contextmanager
    def _naming(self, episode: int | None = None) -> Iterator[None]:
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


def _row_counts(node: Any) -> Iterator[int]:
    """Rows of each array below a group, or of the array itself."""
    if isinstance(node, h5py.Group):
        for key in node:
            yield from _row_counts(open_own(node, key))
    else:
        yield len(node)


def _read(
    node: Any, space: spaces.Space[Any], steps: slice, read_image: Callable[[Any, spaces.Space[Any]], Any]
) -> Any:
    if isinstance(space, spaces.Dict):
        return {
            key: _read(open_own(node, key), part, steps, read_image) for key, part in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
        return tuple(_read(open_own(node, f"_index_{i}"), part, steps, read_image) for i, part in parts)
    if is_text(space):
        return None
    return read_image(node[steps], space) if is_image_space(space) else node[steps]


def _decode(frames: Any, space: spaces.Space[Any]) -> NDArray[np.uint8]:
    """Decode JPEG files, each the bytes of one. For other formats Pillow may run programs, so they fail."""
    return np.stack([_decoded(frame.tobytes(), space) for frame in frames])


def _decoded(frame: bytes, space: spaces.Space[Any]) -> NDArray[np.uint8]:
    """An image; its size is compared with the space before it is decoded."""
    with Image.open(io.BytesIO(frame), formats=["JPEG"]) as image:
        numbers = image.height * image.width * len(image.getbands())
        if numbers != math.prod(space.shape or ()):
            raise ValueError(f"an image has {image.height} x {image.width} pixels, its space is {space}")
        return np.asarray(image).reshape(space.shape or ())


def _as_stored(images: Any, space: spaces.Space[Any]) -> Any:
    return images
