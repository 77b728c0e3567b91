"""Summaries of the datasets on this machine."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from minari.storage.datasets_root_dir import get_dataset_path
from numpy.typing import NDArray

from rlxf.data.conversion import checked_lengths
from rlxf.data.dataset_source import open_source
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

    Raises:
        DatasetError: if the dataset is unknown, empty, truncated, altered or not stored as HDF5.
    """
    source = open_source(dataset_id)
    with EpisodeFile(source) as file:
        lengths = checked_lengths(file)
        returns = [file.rewards(episode).sum() for episode in source.episodes]
    spec = source.dataset.env_spec
    size = source.file.stat().st_size
    return DatasetSummary(
        dataset_id, spec and spec.id, np.array(lengths), np.array(returns), size, source.has_jpeg
    )
