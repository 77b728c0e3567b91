"""Loading of trajectories from one or several Minari datasets."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from gymnasium import spaces

from rlxf.data.cache import ensure_converted
from rlxf.data.conversion import open_array
from rlxf.data.dataset_source import Dataset, Source, open_source
from rlxf.data.reference_scores import ReferenceScores, reference_scores
from rlxf.data.space_comparison import space_mismatches
from rlxf.data.spaces import is_text, leaves
from rlxf.data.trajectories import Trajectories
from rlxf.data.trajectory_validation import check_trajectories
from rlxf.utils.env_ids import is_other_version
from rlxf.utils.errors import DatasetError
from rlxf.utils.warnings import warn_user

ARRAYS = ("observations", "actions", "rewards", "return_to_go", "offsets", "terminated", "truncated")
MOMENTS = ("observation_mean", "observation_std")
"""Names of the arrays that image observations do not have."""


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
        UserWarning: if a part of the observations is text, which is left out, images are stored as JPEG, or
            the datasets were recorded in different versions of an environment.
    """
    chosen = [dataset] if isinstance(dataset, str) or not isinstance(dataset, Sequence) else list(dataset)
    sources = [open_source(each, download) for each in chosen]
    _check_joinable(sources)
    _warn_of_text(sources[0].observation_space)
    _warn_of_jpeg(sources)
    _warn_of_versions(sources)
    folder = ensure_converted(sources, verify, progress_bar)
    paths = {name: folder / f"{name}.npy" for name in (*ARRAYS, *MOMENTS)}
    missing = {name for name in MOMENTS if not paths[name].exists()}
    arrays = {name: None if name in missing else open_array(path) for name, path in paths.items()}
    data = Trajectories(**arrays, **_shared_fields(sources))  # type: ignore[arg-type]
    object.__setattr__(data, "_loaded", True)  # dataclasses.replace resets it
    return data


def as_trajectories(
    dataset: Dataset | Sequence[Dataset] | Trajectories, download: bool = False
) -> Trajectories:
    """Return `Trajectories` unchanged; load anything else with `load_trajectories`.

    Trajectories that were not loaded by it, or were changed, are validated, which reads their arrays once.

    Raises:
        DatasetError: if an array has another dtype or shape than `Trajectories` describes, or contains a
            value that is NaN, infinite or outside of its space. The message names the array and the step.
            Otherwise errors as in `load_trajectories`.
    """
    if not isinstance(dataset, Trajectories):
        return load_trajectories(dataset, download=download)
    if not dataset.loaded:
        check_trajectories(dataset)
    return dataset


def _check_joinable(sources: Sequence[Source]) -> None:
    if not sources:
        raise DatasetError("the sequence of datasets is empty; give at least one")
    first, *others = sources
    expected = first.observation_space, first.action_space
    for other in others:
        for _, mismatch in space_mismatches(expected, (other.observation_space, other.action_space)):
            raise DatasetError(
                f"datasets {first.id} and {other.id} cannot be joined, their spaces differ: {mismatch}"
            )


def _warn_of_text(observation_space: spaces.Space[Any]) -> None:
    if texts := [path for path, leaf in leaves(observation_space, "observation") if is_text(leaf)]:
        warn_user(
            f"{', '.join(texts)} of the dataset is text, which is left out of the observations. If the text "
            f"matters for the task, convert it to numbers with a wrapper and record the dataset again"
        )


def _warn_of_jpeg(sources: Sequence[Source]) -> None:
    if lossy := dict.fromkeys(source.id for source in sources if source.has_jpeg):
        warn_user(
            f"images of {', '.join(lossy)} were stored as JPEG, so they differ slightly from those of the "
            f"environment. If that matters, record them without loss: with rlxf collect, or with Minari and "
            f"jpeg_encoding=False"
        )


def _warn_of_versions(sources: Sequence[Source]) -> None:
    """Warn if two of the datasets were recorded in different versions of an environment."""
    known = {source.dataset.env_spec.id: source for source in sources if source.dataset.env_spec is not None}
    pairs = ((one, other) for one, other in combinations(known, 2) if is_other_version(one, other))
    for one, other in pairs:
        warn_user(
            f"{known[one].id} was recorded in {one}, but {known[other].id} in {other}: dynamics and rewards "
            f"may differ between versions, so returns are not comparable; train on data of one version"
        )


def _shared_fields(sources: Sequence[Source]) -> dict[str, Any]:
    """Return the fields of `Trajectories` other than arrays; None for specs and scores that differ."""
    specs = [source.dataset.env_spec for source in sources]
    return {
        "observation_space": sources[0].observation_space,
        "action_space": sources[0].action_space,
        "env_spec": _common(specs),
        "eval_env_spec": _common([source.eval_env_spec for source in sources]),
        "env_ids": tuple(dict.fromkeys(spec.id for spec in specs if spec is not None)),
        "dataset_ids": tuple(source.id for source in sources),
        "metadata": tuple(source.metadata for source in sources),
        "reference_scores": _common_scores(sources),
        "lossy_images": any(source.has_jpeg for source in sources),
    }


def _common(values: Sequence[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else None


def _common_scores(sources: Sequence[Source]) -> ReferenceScores | None:
    scores = [reference_scores(source.metadata, source.eval_env_spec) for source in sources]
    scales = [None if score is None else (score.minimum, score.maximum) for score in scores]
    return scores[0] if _common(scales) else None
