"""Statistics of SB3's ``VecNormalize`` as a file of JSON and safetensors; its own is a pickle."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from torch import Tensor

from rlxf.training.archive import read_archive, write_archive
from rlxf.training.contents import check_no_folder, misplaced
from rlxf.training.described import described
from rlxf.training.errors import CheckpointError

NAME = "VecNormalize"
SETTINGS = ("norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon", "norm_obs_keys")
PARTS = ("mean", "var", "count")
RETURNS, OBSERVATION = "returns", "observation"


def save_normalizer(path: str | os.PathLike[str], normalizer: VecNormalize) -> None:
    """Write settings and statistics to one file, whole or not at all.

    Raises:
        OSError: if it cannot be written, e.g. the disk is full; what was there before stays.
    """
    settings = {name: getattr(normalizer, name) for name in SETTINGS}
    tensors = {
        f"{name}.{part}": torch.as_tensor(getattr(statistics, part), dtype=torch.float64)
        for name, statistics in _statistics(normalizer).items()
        for part in PARTS
    }
    write_archive(path, {"normalizer": {"name": NAME, "settings": settings}}, {"statistics": tensors})


def load_normalizer(path: str | os.PathLike[str], venv: VecEnv) -> VecNormalize:
    """``venv`` under the settings and statistics that `save_normalizer` wrote.

    As with a new ``VecNormalize``, stepping it moves the statistics on until ``training`` is set to False.

    Raises:
        FileNotFoundError: if there is no such file.
        IsADirectoryError: if it is a folder.
        CheckpointError: if it is truncated, altered or foreign, or of other observations.
    """
    check_no_folder(path, Path(path))
    archive = read_archive(path)
    described_as = archive.documents.get("normalizer")
    if not isinstance(described_as, dict) or described_as.get("name") != NAME:
        raise misplaced(path, archive, f"statistics of {NAME}")
    with described():
        normalizer = VecNormalize(venv, **described_as["settings"])
        for name, statistics in _statistics(normalizer).items():
            _restore(statistics, name, archive.tensors["statistics"])
    return normalizer


def _statistics(normalizer: VecNormalize) -> dict[str, RunningMeanStd]:
    found = {RETURNS: normalizer.ret_rms}
    if not normalizer.norm_obs:
        return found
    observed: Any = normalizer.obs_rms
    if isinstance(observed, dict):
        return found | {f"{OBSERVATION}.{key}": statistics for key, statistics in observed.items()}
    return found | {OBSERVATION: observed}


def _restore(statistics: RunningMeanStd, name: str, tensors: dict[str, Tensor]) -> None:
    for part in PARTS:
        value, old = tensors[f"{name}.{part}"].numpy(), np.asarray(getattr(statistics, part))
        if value.shape != old.shape:
            raise CheckpointError(
                f"the observation space differs from that of the statistics: the {part} of {name} has shape "
                f"{value.shape} in the file and {old.shape} here"
            )
        setattr(statistics, part, value if value.ndim else np.float64(value))
