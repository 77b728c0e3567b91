"""A DecisionTransformer agent as a checkpoint file, and back: JSON and safetensors, nothing that runs."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlxf.agents.decision_transformer.facts import Facts
from rlxf.agents.decision_transformer.objectives import objective_from_json, objective_to_json
from rlxf.attention import TransformerSpec
from rlxf.training import (
    Archive,
    CheckpointError,
    read_archive,
    schedule_from_json,
    schedule_to_json,
    write_archive,
)

if TYPE_CHECKING:
    from rlxf.agents.decision_transformer.learner import DecisionTransformer

NAME = "DecisionTransformer"
GROUPS = {"policy", "optimizer", "random"}
PROGRESS = ("num_timesteps", "_total_timesteps", "_n_updates", "_current_progress_remaining")
NOT_SETTINGS = ("self", "dataset", "env", "download", "device", "_init_setup_model")


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """``path``, with ".zip" added if it has no suffix, as in SB3."""
    path = Path(path)
    return path if path.suffix else path.with_suffix(".zip")


def save(agent: "DecisionTransformer", path: str | os.PathLike[str]) -> None:
    """Write the agent whole or not at all.

    Raises:
        OSError: if the disk is full or the folder cannot be written; an older file is as before.
    """
    tensors = {
        "policy": agent.policy.state_dict(),
        "optimizer": _optimizer_tensors(agent.optimizer),
        "random": {"order": agent.order.get_state()},
    }
    checkpoint_path(path).parent.mkdir(parents=True, exist_ok=True)
    write_archive(checkpoint_path(path), {"agent": _describe(agent)}, tensors)


def read(path: str | os.PathLike[str]) -> Archive:
    """The checked file of a DecisionTransformer agent.

    Raises:
        FileNotFoundError: if there is none.
        CheckpointError: if it is truncated, altered, or no file of a DecisionTransformer agent.
    """
    archive = read_archive(checkpoint_path(path))
    agent = archive.documents.get("agent")
    named = isinstance(agent, dict) and agent.get("name") == NAME
    if not named or archive.tensors.keys() != GROUPS:
        raise CheckpointError(f"{checkpoint_path(path)} is whole, but holds no {NAME} agent")
    return archive


@contextmanager
def _described() -> Iterator[None]:
    """What the description of the agent lacks or has wrong is the file's fault, and said so."""
    try:
        yield
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint is whole, but this version of rlxf cannot build its agent: {error!r}"
        ) from error


@_described()
def settings(archive: Archive) -> dict[str, Any]:
    """The constructor's arguments that the file holds."""
    stored = dict(archive.documents["agent"]["settings"])
    stored["core"] = TransformerSpec.from_dict(stored["core"])
    stored["objective"] = objective_from_json(stored["objective"])
    stored["learning_rate"] = schedule_from_json(stored["learning_rate"])
    return stored


@_described()
def facts(archive: Archive) -> Facts:
    """What the agent keeps of its data."""
    return Facts.from_json(archive.documents["agent"]["facts"])


@_described()
def restore(agent: "DecisionTransformer", archive: Archive) -> None:
    """Put weights, optimiser, random generator and progress into an agent of the same shape.

    Raises:
        CheckpointError: if they do not fit.
    """
    try:
        agent.policy.load_state_dict(archive.tensors["policy"])
        agent.optimizer.load_state_dict(_optimizer_state(agent.optimizer, archive.tensors["optimizer"]))
        agent.order.set_state(archive.tensors["random"]["order"])
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint's weights do not fit its description: {error}") from error
    for name in PROGRESS:
        setattr(agent, name, archive.documents["agent"]["progress"][name])


def constructor_settings(agent: "DecisionTransformer") -> dict[str, Any]:
    """The constructor's arguments by name, but data, environment and device."""
    names = inspect.signature(type(agent).__init__).parameters
    return {name: getattr(agent, name) for name in names if name not in NOT_SETTINGS}


def _describe(agent: "DecisionTransformer") -> dict[str, Any]:
    values = constructor_settings(agent)
    values["core"] = agent.core.to_dict()
    values["objective"] = objective_to_json(agent.objective)
    values["learning_rate"] = schedule_to_json(agent.learning_rate)
    values["tensorboard_log"] = None if agent.tensorboard_log is None else os.fspath(agent.tensorboard_log)
    return {
        "name": NAME,
        "settings": values,
        "facts": agent.facts.to_json(),
        "progress": {name: getattr(agent, name) for name in PROGRESS},
    }


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """``{"3.exp_avg": ...}``: what the optimiser keeps for each of its parameters, by number."""
    state = optimizer.state_dict()["state"]
    return {f"{number}.{name}": value for number, kept in state.items() for name, value in kept.items()}


def _optimizer_state(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """`_optimizer_tensors` in the form that the optimiser loads; its settings stay as they are."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = value
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
