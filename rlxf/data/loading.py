"""Loading of trajectories from Minari datasets, and summaries of the datasets on this machine."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import minari
import numpy as np
from gymnasium import spaces
from minari.storage.datasets_root_dir import get_dataset_path
from numpy.typing import NDArray

from rlxf.data.cache import ensure_converted
from rlxf.data.conversion import open_array
from rlxf.data.dataset_source import Dataset, Source, open_source
from rlxf.data.episode_file import EpisodeFile
from rlxf.data.reference_scores import ReferenceScores, reference_scores
from rlxf.data.spaces import action_mismatch, is_text, leaves, observation_mismatch
from rlxf.data.trajectories import Trajectories
from rlxf.utils.errors import DatasetError

ARRAYS = ("observations", "actions", "rewards", "return_to_go", "offsets", "terminated", "truncated")
MOMENTS = ("observation_mean", "observation_std")
T = TypeVar("T")


def load_trajectories(
    dataset: Dataset | Sequence[Dataset],
    *,
    download: bool = False,
    verify: bool = False,
    progress_bar: bool = False,
) -> Trajectories:
    """Load the episodes of Minari datasets as flat, memory-mapped arrays.

    The first call converts the datasets and stores the arrays in a cache (`cache_root`). A changed dataset or
    a damaged cache is converted again. Observations are encoded by `observation_encoder`, actions by
    `action_encoder`.

    Args:
        dataset: a Minari id, a ``MinariDataset``, or a sequence of these, which are concatenated. Of a
            filtered ``MinariDataset`` only the selected episodes are read.
        download: True to download a dataset that is missing or incomplete on this machine. An incomplete
            copy is replaced when the download is complete.
        verify: compare the SHA-256 of the cache with its manifest, which reads all of it. If False, changes
            that keep the file sizes are not detected.
        progress_bar: show a progress bar while converting.

    Raises:
        DatasetError: if a dataset is unknown, empty, truncated or altered, contains a value that is NaN,
            infinite or outside of its space, or the spaces of the datasets differ. The message names the
            file, or episode and step.
        TypeError: if a space is not supported.
        ConnectionError: if a download fails.
        OSError: if the disk is full.

    Warns:
        UserWarning: if a part of the observations is text, which is left out, or images are stored as JPEG.
    """
    chosen = [dataset] if isinstance(dataset, str) or not isinstance(dataset, Sequence) else list(dataset)
    sources = [open_source(each, download) for each in chosen]
    _check_joinable(sources)
    _warn_of_text(sources[0].observation_space)
    _warn_of_jpeg(sources)
    folder = ensure_converted(sources, verify, progress_bar)
    arrays: dict[str, Any] = {name: open_array(folder / f"{name}.npy") for name in ARRAYS}
    moments: dict[str, Any] = {name: _optional(folder / f"{name}.npy") for name in MOMENTS}
    return Trajectories(**arrays, **moments, **_description(sources))


def as_trajectories(
    dataset: Dataset | Sequence[Dataset] | Trajectories, download: bool = False
) -> Trajectories:
    """Return `Trajectories` unchanged; load anything else with `load_trajectories`."""
    if isinstance(dataset, Trajectories):
        return dataset
    return load_trajectories(dataset, download=download)


def _check_joinable(sources: Sequence[Source]) -> None:
    if not sources:
        raise DatasetError("the sequence of datasets is empty; give at least one")
    first = sources[0]
    for other in sources[1:]:
        mismatch = observation_mismatch(first.observation_space, other.observation_space) or action_mismatch(
            first.action_space, other.action_space
        )
        if mismatch:
            raise DatasetError(
                f"datasets {first.id} and {other.id} cannot be joined, their spaces differ: {mismatch}"
            )


def _warn_of_text(observation_space: spaces.Space[Any]) -> None:
    texts = [path for path, leaf in leaves(observation_space, "observation") if is_text(leaf)]
    if texts:
        warnings.warn(
            f"{', '.join(texts)} of the dataset is text, which is left out of the observations. If the text "
            f"matters for the task, convert it to numbers with a wrapper and record the dataset again",
            stacklevel=3,
        )


def _warn_of_jpeg(sources: Sequence[Source]) -> None:
    lossy = dict.fromkeys(source.id for source in sources if source.has_jpeg)
    if lossy:
        warnings.warn(
            f"images of {', '.join(lossy)} were stored as JPEG, so they differ slightly from those of the "
            f"environment. If that matters, record them without loss: with rlxf collect, or with Minari and "
            f"jpeg_encoding=False",
            stacklevel=3,
        )


def _optional(path: Path) -> NDArray[Any] | None:
    return open_array(path) if path.exists() else None


def _description(sources: Sequence[Source]) -> dict[str, Any]:
    """Return the fields of `Trajectories` other than arrays; None for specs and scores that differ."""
    return {
        "observation_space": sources[0].observation_space,
        "action_space": sources[0].action_space,
        "env_spec": _common([source.dataset.env_spec for source in sources]),
        "eval_env_spec": _common([source.eval_env_spec for source in sources]),
        "dataset_ids": tuple(source.id for source in sources),
        "metadata": tuple(source.metadata for source in sources),
        "reference_scores": _common_scores(sources),
        "lossy_images": any(source.has_jpeg for source in sources),
    }


def _common(values: Sequence[T]) -> T | None:
    return values[0] if all(value == values[0] for value in values) else None


def _common_scores(sources: Sequence[Source]) -> ReferenceScores | None:
    scores = [reference_scores(source.metadata, source.eval_env_spec) for source in sources]
    scales = [None if score is None else (score.minimum, score.maximum) for score in scores]
    return scores[0] if _common(scales) else None


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


def local_ids() -> list[str]:
    """Return the Minari ids of all datasets on this machine, sorted by namespace, name and version.

    Damaged datasets are included.
    """
    return list(minari.list_local_datasets())


def summarize(dataset_id: str) -> DatasetSummary:
    """Summarize a dataset; observations and actions are counted but not read.

    Raises:
        DatasetError: if the dataset is unknown, empty, truncated, altered or not stored as HDF5.
    """
    source = open_source(dataset_id)
    with EpisodeFile(source) as file:
        lengths = [file.length(episode) for episode in source.episodes]
        file.check_totals(lengths)
        returns = [file.rewards(episode).sum() for episode in source.episodes]
    spec = source.dataset.env_spec
    size = source.file.stat().st_size
    return DatasetSummary(
        source.id, spec and spec.id, np.array(lengths), np.array(returns), size, source.has_jpeg
    )
