"""Loading of trajectories from Minari datasets through a cache of converted datasets, and summaries."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from minari.storage.datasets_root_dir import get_dataset_path
from numpy.typing import NDArray

from rlxf.data.conversion import ArrayFile, checked_lengths, convert, open_array
from rlxf.data.dataset_source import Dataset, Source, open_source
from rlxf.data.episode_file import EpisodeFile
from rlxf.data.reference_scores import ReferenceScores, reference_scores
from rlxf.data.spaces import is_text, leaves, space_mismatches
from rlxf.data.trajectories import Trajectories
from rlxf.utils.env_ids import is_other_version
from rlxf.utils.errors import DatasetError
from rlxf.utils.files import file_sha256, not_writable_by_others, temporary_folder, temporary_name
from rlxf.utils.warnings import warn_user

ARRAYS = ("observations", "actions", "rewards", "return_to_go", "offsets", "terminated", "truncated")
MOMENTS = ("observation_mean", "observation_std")
"""Names of the arrays that image observations do not have."""
MANIFEST = "manifest.json"
FORMAT = "rlxf trajectories"
VERSION = 2
"""Version of the array format; caches of other versions are converted again."""
ATTEMPTS = 5


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
    return Trajectories(**arrays, **_description(sources))  # type: ignore[arg-type]


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


def _description(sources: Sequence[Source]) -> dict[str, Any]:
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


def cache_root() -> Path:
    """Return the root of all converted datasets: in RLXF_CACHE, else in XDG_CACHE_HOME, else in ~/.cache."""
    rlxf_cache, xdg_cache = os.environ.get("RLXF_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if rlxf_cache:
        return Path(rlxf_cache) / "trajectories"
    return (Path(xdg_cache) if xdg_cache else Path.home() / ".cache") / "rlxf" / "trajectories"


def cache_folder(sources: Sequence[Source]) -> Path:
    """Return the cache folder of these sources.

    Its name consists of the first id and a hash of all ids, metadata and selected episodes.
    """
    key = hashlib.sha256(json.dumps([source.identity for source in sources]).encode()).hexdigest()
    name = re.sub(r"[^\w.-]+", "-", sources[0].id)
    return cache_root() / f"{name}-{key[:16]}"


def ensure_converted(sources: Sequence[Source], verify: bool = False, progress_bar: bool = False) -> Path:
    """Return the folder with the arrays of the sources; convert them if they are not in the cache.

    Arrays are written to a temporary folder, synced to the disk, and renamed. An incomplete folder, left by
    a crash, a full disk or an interruption, is therefore never used. If two processes convert the same
    sources at once, the second to finish uses the folder of the first.

    Args:
        sources: datasets with equal spaces.
        verify: also read the whole cache and compare its SHA-256; else compare sizes, shapes and dtypes only.
        progress_bar: show a progress bar while converting.

    Raises:
        DatasetError, TypeError: as `convert`.
        OSError: if the disk is full or the cache is not writable.
    """
    folder = cache_folder(sources)
    if _is_intact(folder, sources, verify):
        return folder
    try:
        with not_writable_by_others(), temporary_folder(folder.parent) as temporary:
            description = _describe(sources)
            files = convert(sources, temporary, progress_bar)
            if description != _describe(sources):
                raise DatasetError(f"dataset {sources[0].id} was replaced while it was read; try again")
            write_manifest(temporary, description, files)
            _publish(temporary, folder, sources, verify)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write the converted dataset {sources[0].id} to {folder} ({error.strerror or error}); "
            f"partial files were deleted. Free some space, or set RLXF_CACHE to a folder on another disk",
        ) from error
    return folder


def _is_intact(folder: Path, sources: Sequence[Source], verify: bool) -> bool:
    """Return whether the folder is a complete conversion of the current sources.

    The check compares the manifest, and size, shape and dtype of the arrays. ``verify`` adds the SHA-256 of
    the arrays, which reads all of them.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        arrays = manifest.pop("arrays").items()
        return manifest == _describe(sources) and all(
            _is_array_intact(folder / f"{name}.npy", entry, verify) for name, entry in arrays
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _is_array_intact(path: Path, entry: dict[str, Any], verify: bool) -> bool:
    if path.stat().st_size != entry["size"]:
        return False
    array = open_array(path)
    same_form = (list(array.shape), array.dtype.name) == (entry["shape"], entry["dtype"])
    return same_form and (not verify or file_sha256(path) == entry["sha256"])


def _publish(temporary: Path, folder: Path, sources: Sequence[Source], verify: bool) -> None:
    """Rename ``temporary`` to ``folder``, unless another process has completed the folder in the meantime."""
    for _ in range(ATTEMPTS):
        try:
            return os.rename(temporary, folder)
        except OSError:
            if _is_intact(folder, sources, verify):
                return None
            _remove(folder)
    return os.rename(temporary, folder)


def _remove(folder: Path) -> None:
    """Remove a folder; it is renamed first, so that no process finds it partly deleted."""
    trash = temporary_name(folder.parent)
    try:
        os.rename(folder, trash)
    except FileNotFoundError:
        return  # another process has removed it
    shutil.rmtree(trash, ignore_errors=True)


def write_manifest(folder: Path, description: Mapping[str, Any], files: Sequence[ArrayFile]) -> None:
    """Write ``manifest.json`` with the sources, and size, SHA-256, shape and dtype of each array.

    Args:
        folder: folder of the arrays.
        description: result of `_describe` before the sources were read.
        files: the arrays.

    Raises:
        OSError: if the disk is full.
    """
    manifest = dict(description) | {"arrays": {file.path.stem: file.describe() for file in files}}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def _describe(sources: Sequence[Source]) -> dict[str, Any]:
    """Return the manifest without the arrays: format, and identity and fingerprint of each source."""
    identities = [source.identity | source.fingerprint for source in sources]
    return {"format": FORMAT, "version": VERSION, "sources": identities}
