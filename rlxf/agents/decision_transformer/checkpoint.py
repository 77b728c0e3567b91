"""What learns from windows as a checkpoint file, and back: JSON and safetensors, nothing that runs."""

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
"""Settings with a range; the annotations of the constructor define the other settings."""
TO_JSON: dict[str, Callable[[Any], Any]] = {
    "core": TransformerSpec.to_dict,
    "objective": objective_to_json,
    "learning_rate": schedule_to_json,
}
"""Settings that are no plain data."""
FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "core": TransformerSpec.from_dict,
    "objective": objective_from_json,
    "learning_rate": schedule_from_json,
}
NOT_SETTINGS = (
    *("self", "dataset", "env", "download", "trust", "tensorboard_log", "device", "_init_setup_model"),
)
"""Arguments of the constructor that a file does not hold: the log folder and the trust setting."""


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """``path``, with ".zip" added if it has no suffix, as in SB3."""
    path = Path(path)
    return path if path.suffix else path.with_suffix(".zip")


def contents(agent: "WindowLearner", more: Mapping[str, Mapping[str, Tensor]]) -> Archive:
    """What a file of the agent holds, and ``more`` groups of tensors beside it."""
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
    """Write `contents` whole or not at all.

    Raises:
        OSError: if the disk is full or the folder cannot be written; an older file is as before.
    """
    make_folder(checkpoint_path(path).parent, exist_ok=True)
    write_archive(checkpoint_path(path), archive.documents, archive.tensors)


def read(path: str | os.PathLike[str], name: str, sha256: str | None = None) -> Archive:
    """Return the checked file of an agent of this name; a given SHA-256 must match.

    Raises:
        FileNotFoundError: if there is none.
        IsADirectoryError: if it is a folder.
        CheckpointError: if it is truncated, altered, or no file of such an agent.
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
    """The constructor's arguments that the file holds.

    Raises:
        CheckpointError: if the agent's class does not have one of them, or a value cannot be.
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
    """What the agent keeps of its data."""
    return Facts.from_json(archive.documents["agent"]["facts"], archive.tensor_bytes)


def acting_bytes(archive: Archive, stored: Mapping[str, Any]) -> dict[str, int]:
    """Return upper estimates of the memory that an agent of these settings needs to act, by what it is for.

    Args:
        archive: for the spaces of the agent's data.
        stored: the constructor's arguments, as `settings` gives them.
    """
    known, core = facts(archive), stored["core"]
    numbers = math.prod(known.encoder.shape) + action_form(known.action_space).width
    steps = stored["context_length"] + remembered_steps(core)
    return {
        "acting with the core's memory": state_memory(core),
        "the context of an episode": window_memory(steps, numbers, core.width),
    }


@described()
def restore(agent: "WindowLearner", archive: Archive) -> None:
    """Put weights, optimiser, random generator and progress into an agent of the same shape.

    Raises:
        CheckpointError: if they do not fit.
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
        raise misfit(f"in random, 'order' is no state of a generator ({error})") from error


def constructor_settings(agent: "WindowLearner") -> dict[str, Any]:
    """The constructor's arguments by name, but data, environment and device."""
    return {name: getattr(agent, name) for name in setting_names(type(agent))}


def setting_names(agent: type["WindowLearner"]) -> list[str]:
    """Names of the constructor's arguments that a file holds."""
    return [name for name in inspect.signature(agent.__init__).parameters if name not in NOT_SETTINGS]


def describe(agent: "WindowLearner") -> dict[str, Any]:
    """Name, settings, facts about the data and progress of an agent, as JSON."""
    values = constructor_settings(agent)
    values |= {name: write(values[name]) for name, write in TO_JSON.items() if name in values}
    return {
        "name": agent.NAME,
        "rlxf": VERSION,
        "settings": values,
        "facts": agent.facts.to_json(),
        "progress": {name: getattr(agent, name) for name in PROGRESS},
    }
