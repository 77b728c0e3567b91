"""Checkpoint files of offline agents, and the HParams tab."""

import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlxf.agents.common.actions import action_encoder
from rlxf.agents.common.arguments import PROGRESS, SEED, setting_rules
from rlxf.agents.common.policy_state import state_memory, window_memory
from rlxf.agents.common.retrieval import DATASTORE_GROUP, ActionDatastore, check_datastore
from rlxf.agents.decision_transformer.core import memory_steps
from rlxf.agents.decision_transformer.objectives import objective_from_json, objective_to_json
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.attention import TransformerSpec
from rlxf.training import (
    Archive,
    read_archive,
    schedule_from_json,
    schedule_to_json,
    schedule_to_text,
    write_archive,
)
from rlxf.training.compat import (
    NOTHING,
    VERSION,
    check_fields,
    check_known,
    check_not_a_folder,
    checkpoint_errors,
    number,
    whole,
    wrong_content_error,
)
from rlxf.training.resumed_logger import write_hyperparameters, writes_tensorboard
from rlxf.training.state_checks import (
    check_layers,
    check_weights_fit,
    optimizer_state,
    optimizer_tensors,
    weights_mismatch,
)
from rlxf.utils.files import make_folder

if TYPE_CHECKING:
    from rlxf.agents.offline.algorithm import OfflineAlgorithm


GROUPS = {"policy", "optimizer", "random"}
BOUNDS = {
    "context_length": whole(1),
    "batch_size": whole(1),
    "weight_decay": number(0),
    "warmup_updates": whole(0) | NOTHING,
    "max_grad_norm": number(above=0),
    "return_scale": number(above=0),
    "episode_length": whole(1),
    "mask_probability": number(0, 1),
    "seed": SEED,
    "verbose": whole(0),
}
"""Ranges of numeric settings; the annotations of the constructor define the types of the others."""
TO_JSON: dict[str, Callable[[Any], Any]] = {
    "core": TransformerSpec.to_dict,
    "objective": objective_to_json,
    "learning_rate": schedule_to_json,
}
"""Conversion to JSON of the settings that are not plain data."""
FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "core": TransformerSpec.from_dict,
    "objective": objective_from_json,
    "learning_rate": schedule_from_json,
}
NOT_SETTINGS = (
    *("self", "dataset", "env", "download", "trust", "tensorboard_log", "device", "_init_setup_model"),
)
"""Arguments of the constructor that are not saved, such as the log folder and the trust setting."""


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path``, with ".zip" added if it has no suffix, as in SB3."""
    path = Path(path)
    return path if path.suffix else path.with_suffix(".zip")


def build_archive(agent: "OfflineAlgorithm", more: Mapping[str, Mapping[str, Tensor]]) -> Archive:
    """Return the checkpoint of the agent, with ``more`` groups of tensors added."""
    documents: dict[str, Any] = {"agent": describe(agent)}
    tensors: dict[str, Any] = {
        **more,
        "policy": agent.policy.state_dict(),
        "optimizer": optimizer_tensors(agent.optimizer),
        "random": {"order": agent.order.get_state()},
    }
    if agent.memory is not None:
        documents[DATASTORE_GROUP], tensors[DATASTORE_GROUP] = agent.memory.to_json(), agent.memory.tensors()
    return Archive(documents, tensors)


def save(archive: Archive, path: str | os.PathLike[str]) -> None:
    """Write the result of `build_archive` to a file atomically.

    Raises:
        OSError: if the disk is full or the folder is not writable; an existing file stays unchanged.
    """
    make_folder(checkpoint_path(path).parent, exist_ok=True)
    write_archive(checkpoint_path(path), archive.documents, archive.tensors)


def read(path: str | os.PathLike[str], name: str, sha256: str | None = None) -> Archive:
    """Read and validate the checkpoint of an agent of this name; a given SHA-256 must match.

    Raises:
        FileNotFoundError: if the file does not exist.
        IsADirectoryError: if the path is a folder.
        CheckpointError: if the file is truncated, altered, or not a checkpoint of an agent of this name.
    """
    check_not_a_folder(path, checkpoint_path(path))
    archive = read_archive(checkpoint_path(path), sha256=sha256)
    agent: Any = archive.documents.get("agent")
    named = isinstance(agent, dict) and agent.get("name") == name
    if not named or not archive.tensors.keys() >= GROUPS:
        raise wrong_content_error(checkpoint_path(path), archive, f"{name} agent")
    check_fields(agent.get("settings"), {}, "settings")
    check_fields(agent.get("progress"), PROGRESS, "progress")
    return archive


@checkpoint_errors()
def read_settings(archive: Archive, agent: type["OfflineAlgorithm"]) -> dict[str, Any]:
    """Return the constructor's arguments from the file.

    Raises:
        CheckpointError: if the agent's constructor lacks an argument of the file, or a value is invalid.
    """
    stored = dict(archive.documents["agent"]["settings"])
    check_known(stored, setting_names(agent), archive.documents["agent"].get("rlxf"))
    check_fields(stored, setting_rules(agent, setting_names(agent), BOUNDS), "settings")
    own = setting_names(agent)
    stored |= {name: read(stored[name]) for name, read in FROM_JSON.items() if name in own}
    check_layers(stored["core"].kinds, archive.tensors["policy"])
    return stored


@checkpoint_errors()
def read_dataset_info(archive: Archive) -> DatasetInfo:
    """Return the dataset information in the file."""
    return DatasetInfo.from_json(archive.documents["agent"]["facts"], archive.tensor_bytes)


def inference_memory(archive: Archive, stored: Mapping[str, Any]) -> dict[str, int]:
    """Return upper bounds on the bytes of memory that an agent with these settings needs to act, by purpose.

    Args:
        archive: checkpoint; its dataset information gives the spaces.
        stored: the constructor's arguments, as returned by `read_settings`.
    """
    info, core = read_dataset_info(archive), stored["core"]
    numbers = math.prod(info.encoder.shape) + action_encoder(info.action_space).width
    steps = stored["context_length"] + memory_steps(core)
    return {
        "acting with the core's memory": state_memory(core),
        "the context of an episode": window_memory(steps, numbers, core.width),
    }


@checkpoint_errors()
def restore(agent: "OfflineAlgorithm", archive: Archive) -> None:
    """Load weights, optimizer state, random generator and progress into an agent of the same architecture.

    Raises:
        CheckpointError: if a tensor does not match the agent.
    """
    check_weights_fit(agent.policy, archive.tensors["policy"], "policy")
    updates = archive.documents["agent"]["progress"]["_n_updates"]
    agent.policy.load_state_dict(archive.tensors["policy"])
    agent.optimizer.load_state_dict(optimizer_state(agent.optimizer, archive.tensors["optimizer"], updates))
    _restore_order(agent, archive)
    for name in PROGRESS:
        setattr(agent, name, archive.documents["agent"]["progress"][name])
    if DATASTORE_GROUP in archive.tensors:
        agent.memory = _memory(agent, archive)


def _memory(agent: "OfflineAlgorithm", archive: Archive) -> ActionDatastore:
    memory = ActionDatastore.from_tensors(
        archive.documents[DATASTORE_GROUP], archive.tensors[DATASTORE_GROUP], agent.device
    )
    check_datastore(memory, agent.core.width, action_encoder(agent.facts.action_space))
    return memory


def _restore_order(agent: "OfflineAlgorithm", archive: Archive) -> None:
    try:
        agent.order.set_state(archive.tensors["random"]["order"])
    except RuntimeError as error:
        raise weights_mismatch(f"in random, 'order' is not a generator state ({error})") from error


def constructor_settings(agent: "OfflineAlgorithm") -> dict[str, Any]:
    """Return the constructor's arguments by name, except data, environment and device."""
    return {name: getattr(agent, name) for name in setting_names(type(agent))}


def setting_names(agent: type["OfflineAlgorithm"]) -> list[str]:
    """Return the names of the constructor's arguments that are saved."""
    return [name for name in inspect.signature(agent.__init__).parameters if name not in NOT_SETTINGS]


def describe(agent: "OfflineAlgorithm") -> dict[str, Any]:
    """Return name, settings, dataset information and progress of an agent as JSON."""
    values = constructor_settings(agent)
    values |= {name: write(values[name]) for name, write in TO_JSON.items() if name in values}
    return {
        "name": agent.NAME,
        "rlxf": VERSION,
        "settings": values,
        "facts": agent.facts.to_json(),
        "progress": {name: getattr(agent, name) for name in PROGRESS},
    }


NO_HYPERPARAMETERS = ("verbose", "core")
Plain = bool | int | float | str


def record_hyperparameters(agent: "OfflineAlgorithm") -> None:
    """Write the agent's `hyperparameters` to its logger, if that writes TensorBoard events."""
    if writes_tensorboard(agent.logger):
        write_hyperparameters(agent.logger, hyperparameters(agent))


def hyperparameters(agent: "OfflineAlgorithm") -> dict[str, Plain]:
    """Return the agent's hyperparameters, defaults included, as numbers or short texts.

    In addition to the constructor's arguments: algorithm, datasets, environment and the fields of the core.
    """
    settings = constructor_settings(agent)
    values = {name: value for name, value in settings.items() if name not in NO_HYPERPARAMETERS}
    values |= {field.name: getattr(agent.core, field.name) for field in fields(agent.core)}
    values |= {
        "algorithm": type(agent).__name__,
        "dataset": ", ".join(agent.facts.dataset_ids),
        "env": agent.facts.env_id,
        "learning_rate": schedule_to_text(agent.learning_rate),
        "feed_forward": agent.core.inner_width,
    }
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _plain(value: Any) -> Plain:
    return value if isinstance(value, Plain) else repr(value)
