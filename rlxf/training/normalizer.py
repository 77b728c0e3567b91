"""Files of the statistics of a ``VecNormalize``."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize
from torch import Tensor

from rlxf.training.archive import read_archive, write_archive
from rlxf.training.compat import check_known, checkpoint_errors
from rlxf.training.file_contents import check_not_a_folder, wrong_content_error
from rlxf.training.json_rules import FLAG, NOTHING, TEXTS, check_fields, number
from rlxf.training.states import check_dtype, check_numbers, state_mismatch
from rlxf.utils.errors import CheckpointError

NORMALIZER_RULES = {
    "norm_obs": FLAG,
    "norm_reward": FLAG,
    "clip_obs": number(above=0),
    "clip_reward": number(above=0),
    "gamma": number(0, 1),
    "epsilon": number(above=0),
    "norm_obs_keys": TEXTS | NOTHING,
}
"""Validation rules of the arguments of ``VecNormalize``."""
MOMENTS = {"mean": -math.inf, "var": 0.0, "count": 0.0}
"""Attributes of a ``RunningMeanStd``, and the smallest allowed value of each."""


def save_normalizer(path: str | os.PathLike[str], normalizer: VecNormalize) -> None:
    """Write the settings and statistics of a ``VecNormalize`` to one file, atomically.

    Raises:
        TypeError: if ``normalizer`` neither is nor wraps a ``VecNormalize``.
        OSError: if the file cannot be written, e.g. because the disk is full; an old file is unchanged.
    """
    normalizer = _normalizer_of(normalizer)
    settings = {name: getattr(normalizer, name) for name in NORMALIZER_RULES}
    tensors = {
        f"{name}.{part}": torch.as_tensor(getattr(statistics, part), dtype=torch.float64)
        for name, statistics in _statistics(normalizer).items()
        for part in MOMENTS
    }
    document = {"name": "VecNormalize", "settings": settings}
    write_archive(path, {"normalizer": document}, {"statistics": tensors})


def load_normalizer(path: str | os.PathLike[str], venv: VecEnv) -> VecNormalize:
    """Wrap ``venv`` in a ``VecNormalize`` with the settings and statistics that `save_normalizer` wrote.

    As in a new ``VecNormalize``, steps update the statistics until ``training`` is set to False.

    Raises:
        TypeError: if ``venv`` is not a VecEnv.
        FileNotFoundError: if the file does not exist.
        IsADirectoryError: if ``path`` is a folder.
        CheckpointError: if the file is truncated, altered or not written by rlxf, if it belongs to a
            different observation space, or if a setting or statistic is out of range.
    """
    if not isinstance(venv, VecEnv):
        raise TypeError(
            f"load_normalizer wraps a VecEnv, got {type(venv).__name__}: pass "
            f"rlxf.envs.make_vec_env(ID_OR_FUNCTION, n_envs), for a VectorEnv rlxf.envs.as_vec_env(env)"
        )
    check_not_a_folder(path, Path(path))
    archive = read_archive(path)
    description = archive.documents.get("normalizer")
    if not isinstance(description, dict) or description.get("name") != "VecNormalize":
        raise wrong_content_error(path, archive, "statistics of VecNormalize")
    check_fields(description.get("settings"), {}, "normalizer")
    check_known(description["settings"], NORMALIZER_RULES, None)
    check_fields(description["settings"], NORMALIZER_RULES, "normalizer")
    with checkpoint_errors():
        normalizer = VecNormalize(venv, **description["settings"])
        for name, statistics in _statistics(normalizer).items():
            _restore(statistics, name, archive.tensors.get("statistics", {}))
    return normalizer


def _normalizer_of(env: Any) -> VecNormalize:
    """Return the ``VecNormalize`` among an environment and its wrappers; raise TypeError without one."""
    found = unwrap_vec_normalize(env) if isinstance(env, VecEnv) else None
    if found is None:
        raise TypeError(
            f"save_normalizer writes the statistics of a VecNormalize, got {type(env).__name__} without one: "
            f"train in VecNormalize(make_vec_env(id, n_envs)), and pass that"
        )
    return found


def _statistics(normalizer: VecNormalize) -> dict[str, RunningMeanStd]:
    statistics = {"returns": normalizer.ret_rms}
    if not normalizer.norm_obs:
        return statistics
    obs_rms: Any = normalizer.obs_rms
    if isinstance(obs_rms, dict):
        return statistics | {f"observation.{key}": rms for key, rms in obs_rms.items()}
    return statistics | {"observation": obs_rms}


def _restore(statistics: RunningMeanStd, name: str, tensors: dict[str, Tensor]) -> None:
    for part, least in MOMENTS.items():
        key = f"{name}.{part}"
        shape = np.shape(getattr(statistics, part))
        if key not in tensors:
            raise state_mismatch(f"statistics lack the tensor {key!r}")
        check_dtype("statistics", key, tensors[key], torch.float64)
        check_numbers("statistics", key, tensors[key], least=least)
        value = tensors[key].numpy()
        if value.shape != shape:
            raise CheckpointError(
                f"the observation space differs from that of the statistics: the {part} of {name} has shape "
                f"{value.shape} in the file and {shape} here"
            )
        setattr(statistics, part, value if value.ndim else np.float64(value))
