"""Checkpoint files of offline agents, and the resumption of their training."""

import os
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from rlxf.agents.common.checkpoint import (
    check_resumable,
    check_same_settings,
    check_unfinished,
    newest_checkpoint_file,
    read_agent_archive,
    stored_optimizer_state,
    stored_settings,
)
from rlxf.agents.offline.config import OfflineConfig
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.optimizer_step import OfflineUpdate
from rlxf.training import Archive, ResumeError, states
from rlxf.training.compat import VERSION, checkpoint_errors

Config = TypeVar("Config", bound=OfflineConfig)
WINDOW_GENERATOR = "window_generator"
"""Name of the group of the generator that draws windows, with one tensor, "state"."""
GROUPS = {"policy", "optimizer", WINDOW_GENERATOR}
METRICS = "metrics"
"""Name of the group of tensors with the metrics since the last log output."""


def describe(name: str, config: OfflineConfig, info: DatasetInfo, progress: dict[str, Any]) -> dict[str, Any]:
    """Return name, settings, dataset information and progress of an agent as JSON data."""
    return {
        "name": name,
        "rlxf": VERSION,
        "settings": config.to_json(),
        "dataset_info": info.to_json(),
        "progress": progress,
    }


def build_archive(description: Any, update: OfflineUpdate, generator: torch.Generator) -> Archive:
    """Return the checkpoint of an agent; tensors are not copied.

    Args:
        description: result of `describe`.
        update: the current update, with model, optimizer and pending metrics.
        generator: generator of batches.
    """
    tensors = {
        states.RNG_GROUP: states.get_rng_states(),
        "policy": update.acting.state_dict(),
        "optimizer": states.optimizer_tensors(update.optimizer),
        WINDOW_GENERATOR: {"state": generator.get_state()},
    }
    metrics = update.metrics()
    average = update.average
    more = ({METRICS: metrics} if metrics else {}) | ({} if average is None else average.state())
    return Archive({"agent": description}, tensors | more)


@checkpoint_errors()
def read_config(archive: Archive, config: type[Config], changes: Mapping[str, Any]) -> Config:
    """Return the configuration in a checkpoint.

    Args:
        archive: the checkpoint.
        config: class of the configuration.
        changes: settings passed to ``load``, see `OfflineConfig.from_json`.

    Raises:
        CheckpointError: if the configuration lacks an argument of the file, or a value is invalid.
    """
    stored = config.from_json(stored_settings(archive, config.rules(), config.default_json()), changes)
    states.check_layers(stored.layers, archive.tensors["policy"])
    return stored


@checkpoint_errors()
def read_dataset_info(archive: Archive) -> DatasetInfo:
    """Return the dataset information in a checkpoint."""
    return DatasetInfo.from_json(archive.documents["agent"]["dataset_info"], archive.tensor_bytes)


def restore(update: OfflineUpdate, generator: torch.Generator, archive: Archive) -> None:
    """Load weights, their average, optimizer state and generator of batches.

    If only the file or only the agent averages its weights, the agent starts from the weights that act in the
    file.

    Raises:
        CheckpointError: if a tensor does not fit the model, or would make a recurrent state overflow.
    """
    model = update.acting
    agent = archive.documents["agent"]
    states.check_weights_fit(model, archive.tensors["policy"], "policy")
    model.check_stored_parameters(archive.tensors["policy"])
    model.load_state_dict(archive.tensors["policy"])
    if update.average is not None and agent["settings"].get("weight_averaging") is not None:
        update.average.load_state(archive.tensors)
    update.optimizer.load_state_dict(stored_optimizer_state(update.optimizer, archive))
    try:
        generator.set_state(archive.tensors[WINDOW_GENERATOR]["state"])
    except RuntimeError as error:
        raise states.state_mismatch(
            f"in {WINDOW_GENERATOR}, 'state' is not a generator state ({error})"
        ) from error


def restore_training_state(update: OfflineUpdate, archive: Archive) -> None:
    """Restore the pending metrics and the random generators; call it last, just before training continues.

    Raises:
        CheckpointError: if the metrics are no lists of numbers, or the generators invalid.
    """
    metrics = archive.tensors.get(METRICS, {})
    for name, values in metrics.items():
        if values.ndim != 1 or not values.is_floating_point():
            form = f"{values.dtype} of shape {tuple(values.shape)}"
            raise states.state_mismatch(f"in {METRICS}, {name!r} is {form}, not a list of floats")
    update.load_metrics(metrics)
    states.set_rng_states(archive.tensors[states.RNG_GROUP])


def read_resumable_run(path: str | os.PathLike[str], description: Any, steps: int) -> Archive:
    """Read the checkpoint of an offline training run with the settings and data of an agent.

    Args:
        path: path of the file, or of a folder of `CheckpointWriter`.
        description: result of `describe` for the agent with its dataset.
        steps: requested total number of updates, including those in the file.

    Raises:
        FileNotFoundError: if there is no file.
        CheckpointError: if it is damaged, of another format, or holds no generator states.
        ResumeError: if its settings or data differ from the agent's, the run has reached ``steps`` already,
            or it was written by `learn_online`.
    """
    file = newest_checkpoint_file(path)
    archive = read_matching_run(file, description)
    if "online" in archive.documents:
        raise ResumeError(
            f"{file} was written during learn_online: resume it with learn_online(resume_from=...)"
        )
    check_unfinished(archive.documents["agent"]["progress"]["num_timesteps"], steps, "steps", file)
    return archive


def read_matching_run(path: str | os.PathLike[str], description: Any) -> Archive:
    """Read the checkpoint of a run with the settings and data of an agent, even if the run is complete."""
    file = newest_checkpoint_file(path)
    archive = read_agent_archive(file, description["name"], GROUPS)
    check_resumable(archive, file)
    for kind in ("settings", "dataset_info"):
        own, stored = (dict(each[kind]) for each in (description, archive.documents["agent"]))
        for each in (own, stored):
            each.pop("verbose", None)  # has no effect on results
            if kind == "dataset_info":
                each["fingerprint of the data"] = each.pop("fingerprint")
        check_same_settings(own, stored, file)
    return archive
