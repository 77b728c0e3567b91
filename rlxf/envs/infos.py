"""Infos of environments: keys, the entries of one environment of a batch, and those of ended episodes."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from rlxf.utils.errors import FaultyEnvironmentError

LOST, BROKEN = "Workers.lost", "Workers.broken"
"""Keys of infos.

LOST: True in each step that is lost because an environment failed. BROKEN: the cause, only in the first of
these steps.
"""


def is_filler(infos: Sequence[dict[str, Any]]) -> NDArray[np.bool_]:
    """Return the mask of the environments whose step is a reset step, bool (N,); see `GymnasiumVecEnv`."""
    return np.array([info.get("filler", False) for info in infos], np.bool_)


def info_of(infos: dict[str, Any], i: int) -> dict[str, Any]:
    """Return the info of environment i from the ``infos`` of a batch.

    Gymnasium keeps one array per key and, under ``"_" + key``, a mask (N,) of the environments that set it.
    A key without a mask belongs to the whole batch and is left out. In a dict without any masks, as the
    vector wrapper ``RecordEpisodeStatistics`` adds it, each array has one entry per environment.
    """
    keys = [key for key in infos if f"_{key}" in infos and infos[f"_{key}"][i]]
    return {key: _entry(infos[key], i) for key in keys}


def fill_infos(rows: Sequence[dict[str, Any]], infos: Mapping[str, Any], selected: NDArray[np.bool_]) -> None:
    """Add the entries of a batch of infos to one dict per environment, in the form of `info_of`.

    Args:
        rows: dicts of the N environments, which are changed.
        infos: infos of the batch.
        selected: environments whose dict gets its entries, bool (N,).
    """
    for key in [key for key in infos if f"_{key}" in infos]:
        for i in np.flatnonzero(np.asarray(infos[f"_{key}"], np.bool_) & selected).tolist():
            rows[i][key] = _entry(infos[key], i)


def is_episode(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether an entry ``episode`` of infos has the return and the length of an episode."""
    return isinstance(value, dict) and {"r", "l"} <= value.keys()


def success_of(info: Mapping[str, Any]) -> float | None:
    """Return the success of an episode, ``is_success``, as a number; None if it is unknown.

    It is a number or an array of one number. An array of another size is no success, 0.

    Raises:
        FaultyEnvironmentError: if it is not a number, e.g. text.
    """
    success = info.get("is_success")
    if success is None:
        return None
    try:
        value = np.asarray(success)
    except (TypeError, ValueError):  # lists of different lengths, and tensors on an accelerator
        value = np.asarray(None)
    if value.dtype.kind not in "biuf":
        raise FaultyEnvironmentError(
            f"info['is_success'] of an episode must be True, False or a number, got {success!r}; correct the "
            f"environment, or wrap it"
        )
    return float(value.item()) if value.size == 1 else 0.0


def without_other_episode(infos: dict[str, Any]) -> dict[str, Any]:
    """Leave out an entry ``episode`` of another meaning, which Stable-Baselines3 would log."""
    if "episode" not in infos or is_episode(infos["episode"]):
        return infos
    return _without_episode(infos)


def _without_episode(infos: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in infos.items() if key != "episode"}


def without_vector_statistics(infos: dict[str, Any]) -> dict[str, Any]:
    """Leave out the entry ``episode`` of a vector wrapper ``RecordEpisodeStatistics``, which has no masks.

    With DISABLED it is wrong: `SyncVectorEnv` removes the mask from the options of a reset, so the wrapper
    clears the counts of all environments.
    """
    if "_r" in infos.get("episode", {"_r": None}):
        return infos
    return _without_episode(infos)


def final_infos(infos: dict[str, Any]) -> Any:
    """Return the infos of the episodes that ended in a step with SAME_STEP.

    Those of a vector wrapper ``RecordEpisodeStatistics`` are not in ``final_info`` and are added.
    """
    final = infos.get("final_info", {})
    if not isinstance(final, dict) or "episode" in final:
        return final
    return final | {key: infos[key] for key in ("episode", "_episode") if key in infos}


def last_info(infos: Any, i: int, n_envs: int) -> dict[str, Any]:
    """Return the info of environment i at the end of its episode.

    In addition to the form of `info_of`, this function accepts a sequence with one info for each environment,
    as in Gymnasium 0.29, and an array ``is_success`` of all environments without a mask.
    """
    if not isinstance(infos, dict):
        return dict(infos[i] or {})
    info = info_of(infos, i)
    if "_is_success" not in infos and np.shape(infos.get("is_success", ())) == (n_envs,):
        info["is_success"] = infos["is_success"][i]
    return info


def _entry(value: Any, i: int) -> Any:
    if isinstance(value, dict):
        if any(f"_{key}" in value for key in value):
            return info_of(value, i)
        return {key: _entry(part, i) for key, part in value.items() if isinstance(part, np.ndarray | dict)}
    return value[i].item() if isinstance(value[i], np.generic) else value[i]
