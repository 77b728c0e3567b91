"""Checkpoint files of offline algorithms: JSON documents and safetensors, no executable content."""

import inspect
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlxf.agents.acting_memory import state_memory, window_memory
from rlxf.agents.actions import action_form
from rlxf.agents.decision_transformer.core import remembered_steps
from rlxf.agents.decision_transformer.facts import Facts
from rlxf.agents.decision_transformer.objectives import objective_from_json, objective_to_json
from rlxf.agents.memory import MEMORY, Memory
from rlxf.agents.remembering import check_remembered
from rlxf.agents.stored_settings import PROGRESS, SEED, setting_rules
from rlxf.attention import TransformerSpec
from rlxf.training import (
    Archive,
    read_archive,
    schedule_from_json,
    schedule_to_json,
    write_archive,
)
from rlxf.training.contents import check_no_folder, misplaced
from rlxf.training.described import VERSION, check_known, described
from rlxf.training.field_rules import NOTHING, check_fields, number, whole
from rlxf.training.fit import check_layers, check_weights_fit, misfit
from rlxf.training.optimizer_state import optimizer_state, optimizer_tensors
from rlxf.utils.permissions import make_folder

if TYPE_CHECKING:
    from rlxf.agents.decision_transformer.window_learner import WindowLearner

GROUPS = {"policy", "optimizer", "random"}
BOUNDS = {
    "context_length": whole(1),
    "batch_size": whole(1),
    "weight_decay": number(0),
    "warmup_updates": whole(0) | NOTHING,
    "max_grad_norm": number(above=0),
    "return_scale": number(above=0),
    "episode_length": whole(1),
    "chosen": number(0, 1),
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


def contents(agent: "WindowLearner", more: Mapping[str, Mapping[str, Tensor]]) -> Archive:
    """Return the checkpoint of the agent, with ``more`` groups of tensors added."""
    documents: dict[str, Any] = {"agent": describe(agent)}
    tensors: dict[str, Any] = {
        **more,
        "policy": agent.policy.state_dict(),
        "optimizer": optimizer_tensors(agent.optimizer),
        "random": {"order": agent.order.get_state()},
    }
    if agent.memory is not None:
        documents[MEMORY], tensors[MEMORY] = agent.memory.to_json(), agent.memory.tensors()
    return Archive(documents, tensors)


def save(archive: Archive, path: str | os.PathLike[str]) -> None:
    """Write the result of `contents` to a file atomically.

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
    check_no_folder(path, checkpoint_path(path))
    archive = read_archive(checkpoint_path(path), sha256=sha256)
    agent: Any = archive.documents.get("agent")
    named = isinstance(agent, dict) and agent.get("name") == name
    if not named or not archive.tensors.keys() >= GROUPS:
        raise misplaced(checkpoint_path(path), archive, f"{name} agent")
    check_fields(agent.get("settings"), {}, "settings")
    check_fields(agent.get("progress"), PROGRESS, "progress")
    return archive


@described()
def settings(archive: Archive, agent: type["WindowLearner"]) -> dict[str, Any]:
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


@described()
def facts(archive: Archive) -> Facts:
    """Return the dataset information in the file."""
    return Facts.from_json(archive.documents["agent"]["facts"], archive.tensor_bytes)


def acting_bytes(archive: Archive, stored: Mapping[str, Any]) -> dict[str, int]:
    """Return upper bounds on the bytes of memory that an agent with these settings needs to act, by purpose.

    Args:
        archive: checkpoint; its dataset information gives the spaces.
        stored: the constructor's arguments, as returned by `settings`.
    """
    info, core = facts(archive), stored["core"]
    numbers = math.prod(info.encoder.shape) + action_form(info.action_space).width
    steps = stored["context_length"] + remembered_steps(core)
    return {
        "acting with the core's memory": state_memory(core),
        "the context of an episode": window_memory(steps, numbers, core.width),
    }


@described()
def restore(agent: "WindowLearner", archive: Archive) -> None:
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
    if MEMORY in archive.tensors:
        agent.memory = _memory(agent, archive)


def _memory(agent: "WindowLearner", archive: Archive) -> Memory:
    memory = Memory.restored(archive.documents[MEMORY], archive.tensors[MEMORY], agent.device)
    check_remembered(memory, agent.core.width, action_form(agent.facts.action_space))
    return memory


def _restore_order(agent: "WindowLearner", archive: Archive) -> None:
    try:
        agent.order.set_state(archive.tensors["random"]["order"])
    except RuntimeError as error:
        raise misfit(f"in random, 'order' is not a generator state ({error})") from error


def constructor_settings(agent: "WindowLearner") -> dict[str, Any]:
    """Return the constructor's arguments by name, except data, environment and device."""
    return {name: getattr(agent, name) for name in setting_names(type(agent))}


def setting_names(agent: type["WindowLearner"]) -> list[str]:
    """Return the names of the constructor's arguments that are saved."""
    return [name for name in inspect.signature(agent.__init__).parameters if name not in NOT_SETTINGS]


def describe(agent: "WindowLearner") -> dict[str, Any]:
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
