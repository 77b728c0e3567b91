"""From a dataset's name to its trajectories."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from gymnasium import spaces
from numpy.typing import NDArray

from rlxf.envs.trajectories.array_file import open_array
from rlxf.envs.trajectories.cache import ensure_converted
from rlxf.envs.trajectories.errors import DatasetError
from rlxf.envs.trajectories.matching import action_mismatch, observation_mismatch
from rlxf.envs.trajectories.parts import texts_in
from rlxf.envs.trajectories.reference_scores import ReferenceScores, reference_scores
from rlxf.envs.trajectories.source import Dataset, Source, open_source
from rlxf.envs.trajectories.trajectories import Trajectories

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
    """The episodes of Minari datasets as flat arrays, converted once and memory-mapped from then on.

    The conversion is kept in a cache (`cache_root`) and made anew when the dataset has changed or the cache
    is damaged. Its observations are encoded by `observation_encoder`, its actions by `action_encoder`.

    Args:
        dataset: a Minari id; a ``MinariDataset``, also a filtered one, of which only the episodes that are
            left are read; or several of these, joined one after the other.
        download: whether an id that is not on this machine is downloaded, or one of which only a part is, as
            a download that was cut leaves it. It takes the place of that when all of it is here.
        verify: compare the SHA-256 of a cache with its manifest, which reads all of it; without, changes that
            leave the sizes as they were are not found.
        progress_bar: show one while converting.

    Raises:
        DatasetError: if a dataset is unknown, empty, truncated or altered (the file is named), holds a NaN,
            an infinite number or one outside of its space (episode and step are named), or the spaces of
            joined datasets differ.
        TypeError: if a space is of a kind that is not read.
        ConnectionError: if a dataset has to be downloaded and cannot be.
        OSError: if the disk is full.

    Warns:
        UserWarning: if a part of the observations is text, which is left out, or images went through JPEG.
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
    """The data by themselves; see `load_trajectories`."""
    if isinstance(dataset, Trajectories):
        return dataset
    return load_trajectories(dataset, download=download)


def _check_joinable(sources: Sequence[Source]) -> None:
    if not sources:
        raise DatasetError("there is no dataset; give at least one")
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
    texts = texts_in(observation_space, "observation")
    if texts:
        warnings.warn(
            f"{', '.join(texts)} of the dataset is text, which is not read: the observations are what is "
            f"left. Where it says what to do, turn it into numbers with a wrapper and record anew",
            stacklevel=3,
        )


def _warn_of_jpeg(sources: Sequence[Source]) -> None:
    lossy = dict.fromkeys(source.id for source in sources if source.has_jpeg)
    if lossy:
        warnings.warn(
            f"images of {', '.join(lossy)} were stored as JPEG, so they differ a little from what the "
            f"environment shows. Where that matters, record them without loss: rlxf collect does, and Minari "
            f"with jpeg_encoding=False",
            stacklevel=3,
        )


def _optional(path: Path) -> NDArray[Any] | None:
    return open_array(path) if path.exists() else None


def _description(sources: Sequence[Source]) -> dict[str, Any]:
    """What `Trajectories` says beside the arrays; where sources do not agree it is None."""
    return {
        "observation_space": sources[0].observation_space,
        "action_space": sources[0].action_space,
        "env_spec": _agreed([source.dataset.env_spec for source in sources]),
        "eval_env_spec": _agreed([source.eval_env_spec for source in sources]),
        "dataset_ids": tuple(source.id for source in sources),
        "metadata": tuple(source.metadata for source in sources),
        "reference_scores": _agreed_scores(sources),
        "lossy_images": any(source.has_jpeg for source in sources),
    }


def _agreed(values: Sequence[T]) -> T | None:
    return values[0] if all(value == values[0] for value in values) else None


def _agreed_scores(sources: Sequence[Source]) -> ReferenceScores | None:
    scores = [reference_scores(source.metadata, source.eval_env_spec) for source in sources]
    scales = [None if score is None else (score.minimum, score.maximum) for score in scores]
    return scores[0] if _agreed(scales) else None
