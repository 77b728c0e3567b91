"""Summaries of the datasets on this machine."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from minari.storage.datasets_root_dir import get_dataset_path
from numpy.typing import NDArray

from rlxf.data.cache import find_converted
from rlxf.data.conversion import checked_lengths, open_array
from rlxf.data.dataset_source import Source, open_source
from rlxf.data.episode_file import EpisodeFile


@dataclass(frozen=True, eq=False)
class DatasetSummary:
    """Summary of a dataset.

    Args:
        id: Minari id.
        environment: Gymnasium id of the environment of the dataset; None if the dataset names none.
        lengths: int64 (E,), number of steps of each episode.
        returns: float64 (E,), sum of the rewards of each episode.
        size: bytes on the disk.
        lossy_images: True if images are stored as JPEG.
    """

    id: str
    environment: str | None
    lengths: NDArray[np.int64]
    returns: NDArray[np.float64]
    size: int
    lossy_images: bool


def local_folder() -> Path:
    """Return Minari's dataset folder: MINARI_DATASETS_PATH, else ``~/.minari/datasets``."""
    return get_dataset_path()


def summarize(dataset_id: str) -> DatasetSummary:
    """Summarize a dataset; observations and actions are counted but not read.

    Lengths and returns are those of the converted dataset, in float32, if the cache contains it.

    Raises:
        DatasetError: if the dataset is unknown, empty, truncated, altered or not stored as HDF5.
    """
    source = open_source(dataset_id)
    lengths, returns = _read_converted(source) or _read_episodes(source)
    spec = source.dataset.env_spec
    size = source.file.stat().st_size
    return DatasetSummary(dataset_id, spec and spec.id, lengths, returns, size, source.has_jpeg)


def _read_converted(source: Source) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """Return the lengths and returns of the episodes from the cache; None if they are not in it."""
    folder = find_converted([source])
    if folder is None:
        return None
    offsets, return_to_go = (open_array(folder / f"{name}.npy") for name in ("offsets", "return_to_go"))
    return np.diff(offsets), return_to_go[offsets[:-1]].astype(np.float64)


def _read_episodes(source: Source) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the lengths and returns of the episodes from the file of the dataset."""
    with EpisodeFile(source) as file:
        lengths = checked_lengths(file)
        returns = [file.rewards(episode).sum() for episode in source.episodes]
    return np.array(lengths), np.array(returns)
