"""Files of SB3's ``VecNormalize`` statistics as JSON and safetensors, instead of SB3's pickle."""

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
from rlxf.training.compat import (
    FLAG,
    NOTHING,
    TEXTS,
    check_fields,
    check_known,
    check_not_a_folder,
    checkpoint_errors,
    number,
    wrong_content_error,
)
from rlxf.training.state_checks import check_dtype, check_numbers, weights_mismatch
from rlxf.utils.errors import CheckpointError

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
"""Validation rules of the arguments of ``VecNormalize``."""
PARTS = {"mean": -math.inf, "var": 0.0, "count": 0.0}
"""Attributes of a ``RunningMeanStd``, and the smallest allowed value of each."""
RETURNS, OBSERVATION = "returns", "observation"


def save_normalizer(path: str | os.PathLike[str], normalizer: VecNormalize) -> None:
    """Write the settings and statistics of a ``VecNormalize`` to one file, atomically.

    Raises:
        OSError: if the file cannot be written, e.g. because the disk is full; an old file is unchanged.
    """
    settings = {name: getattr(normalizer, name) for name in SETTINGS}
    tensors = {
        f"{name}.{part}": torch.as_tensor(getattr(statistics, part), dtype=torch.float64)
        for name, statistics in _statistics(normalizer).items()
        for part in PARTS
    }
    write_archive(path, {"normalizer": {"name": NAME, "settings": settings}}, {"statistics": tensors})


def load_normalizer(path: str | os.PathLike[str], venv: VecEnv) -> VecNormalize:
    """Wrap ``venv`` in a ``VecNormalize`` with the settings and statistics that `save_normalizer` wrote.

    As in a new ``VecNormalize``, steps update the statistics until ``training`` is set to False.

    Raises:
        FileNotFoundError: if the file does not exist.
        IsADirectoryError: if ``path`` is a folder.
        CheckpointError: if the file is truncated, altered or not written by rlxf, if it belongs to another
            observation space, or if a setting or statistic is out of range.
    """
    check_not_a_folder(path, Path(path))
    archive = read_archive(path)
    description = archive.documents.get("normalizer")
    if not isinstance(description, dict) or description.get("name") != NAME:
        raise wrong_content_error(path, archive, f"statistics of {NAME}")
    check_fields(description.get("settings"), {}, "normalizer")
    check_known(description["settings"], SETTINGS, None)
    check_fields(description["settings"], SETTINGS, "normalizer")
    with checkpoint_errors():
        normalizer = VecNormalize(venv, **description["settings"])
        for name, statistics in _statistics(normalizer).items():
            _restore(statistics, name, archive.tensors.get("statistics", {}))
    return normalizer


def _statistics(normalizer: VecNormalize) -> dict[str, RunningMeanStd]:
    statistics = {RETURNS: normalizer.ret_rms}
    if not normalizer.norm_obs:
        return statistics
    obs_rms: Any = normalizer.obs_rms
    if isinstance(obs_rms, dict):
        return statistics | {f"{OBSERVATION}.{key}": rms for key, rms in obs_rms.items()}
    return statistics | {OBSERVATION: obs_rms}


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
    """Return a tensor as an array; raise CheckpointError unless it is finite and at least ``least``."""
    if name not in tensors:
        raise weights_mismatch(f"statistics lack the tensor {name!r}")
    check_dtype("statistics", name, tensors[name], torch.float64)
    check_numbers("statistics", name, tensors[name], least=least)
    return tensors[name].numpy()
