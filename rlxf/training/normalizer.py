"""Statistics of SB3's ``VecNormalize`` as a file of JSON and safetensors; its own is a pickle."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from torch import Tensor

from rlxf.training.archive import read_archive, write_archive
from rlxf.training.contents import check_no_folder, misplaced
from rlxf.training.described import check_known, described
from rlxf.training.errors import CheckpointError
from rlxf.training.field_rules import FLAG, NOTHING, TEXTS, check_fields, number
from rlxf.training.fit import check_numbers, misfit

NAME = "VecNormalize"
SETTINGS = {
    "norm_obs": FLAG,
    "norm_reward": FLAG,
    "clip_obs": number(above=0),
    "clip_reward": number(above=0),
    "gamma": number(0, 1),
    "epsilon": number(above=0),
    "norm_obs_keys": TEXTS | NOTHING,
}
"""Arguments of ``VecNormalize``, and the rule for each."""
PARTS = {"mean": -math.inf, "var": 0.0, "count": 0.0}
"""Parts of a ``RunningMeanStd``, and the smallest number of each."""
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
        CheckpointError: if it is truncated, altered or foreign, of other observations, or a setting or a
            number of its statistics is out of range.
    """
    check_no_folder(path, Path(path))
    archive = read_archive(path)
    described_as = archive.documents.get("normalizer")
    if not isinstance(described_as, dict) or described_as.get("name") != NAME:
        raise misplaced(path, archive, f"statistics of {NAME}")
    check_fields(described_as.get("settings"), {}, "normalizer")
    check_known(described_as["settings"], SETTINGS, None)
    check_fields(described_as["settings"], SETTINGS, "normalizer")
    with described():
        normalizer = VecNormalize(venv, **described_as["settings"])
        for name, statistics in _statistics(normalizer).items():
            _restore(statistics, name, archive.tensors.get("statistics", {}))
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
    for part, least in PARTS.items():
        value, old = _checked(tensors, f"{name}.{part}", least), np.asarray(getattr(statistics, part))
        if value.shape != old.shape:
            raise CheckpointError(
                f"the observation space differs from that of the statistics: the {part} of {name} has shape "
                f"{value.shape} in the file and {old.shape} here"
            )
        setattr(statistics, part, value if value.ndim else np.float64(value))


def _checked(tensors: dict[str, Tensor], name: str, least: float) -> NDArray[np.float64]:
    """Return the numbers of a tensor; raise CheckpointError unless they are finite and at least so large."""
    if name not in tensors:
        raise misfit(f"statistics lack the tensor {name!r}")
    if tensors[name].dtype != torch.float64:
        raise misfit(f"in statistics, the tensor {name!r} is of {tensors[name].dtype}, not torch.float64")
    check_numbers("statistics", name, tensors[name], least=least)
    return tensors[name].numpy()
