"""Checkpoint files of GTrXLPPO: contents and checks."""

import inspect
import os
import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from gymnasium import Space
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN
from torch.optim import Optimizer

from rlxf.agents.common.checkpoint import (
    OPTIMIZER,
    read_agent_archive,
    setting_rules,
    stored_optimizer_state,
    stored_settings,
)
from rlxf.agents.common.weights import check_stored_parameters
from rlxf.agents.gtrxl.config import BOUNDS, SCHEDULES
from rlxf.agents.gtrxl.policies import POLICIES
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.value_head import check_statistics
from rlxf.attention import TransformerSpec
from rlxf.attention.memory.base import NoMemory
from rlxf.training import (
    Archive,
    CheckpointError,
    describe_difference,
    schedule_from_json,
    schedule_to_json,
    space_from_json,
    space_to_json,
)
from rlxf.training.compat import VERSION, checkpoint_errors
from rlxf.training.states import check_layers, check_weights_fit, optimizer_tensors
from rlxf.utils.dtypes import to_builtin
from rlxf.utils.warnings import warn_user

NOT_SETTINGS = (
    "self",
    "policy",
    "env",
    "memory_length",
    "tensorboard_log",
    "device",
    "compile",
    "cuda_graphs",
    "_init_setup_model",
)
"""Arguments of the constructor that are not stored as settings in a file."""
WEIGHT_SETTINGS = ("previous_action", "use_sde", "reconstruction_coef")
"""Settings whose truth value determines the weights, in addition to the core and policy_kwargs."""
EXTRACTORS = (FlattenExtractor, NatureCNN, CombinedExtractor)
OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD)
CLASSES: dict[str, type] = {cls.__name__: cls for cls in (*EXTRACTORS, *OPTIMIZERS)}
"""Classes that a file can store in policy_kwargs. Other classes must be passed again to ``load``."""


def build_archive(document: dict[str, Any], policy: GTrXLPolicy) -> Archive:
    """Return the contents of a checkpoint without a datastore; tensors are not copied.

    Args:
        document: result of `describe`.
        policy: policy with its optimizer.

    Warns:
        UserWarning: if the optimizer was replaced by one of another class, which `load` needs as an argument.
    """
    warn_of_replaced_optimizer(policy.optimizer, policy.optimizer_class)
    tensors = {"policy": policy.state_dict(), "optimizer": optimizer_tensors(policy.optimizer)}
    return Archive({"agent": document}, tensors)


def warn_of_replaced_optimizer(optimizer: Optimizer, configured: Any) -> None:
    """Warn if an optimizer is not of the class with which the agent was built, as its file says."""
    if not isinstance(configured, type) or type(optimizer) is configured:
        return
    name = type(optimizer).__name__
    warn_user(
        f"the class of the policy's optimizer is {name}, but the agent was built with "
        f"{configured.__name__}, so a file with its state can be loaded only with "
        f"policy_kwargs={{'optimizer_class': {name}, ...}}; pass them to the constructor, or save with "
        f"exclude=[{OPTIMIZER!r}]"
    )


def read_checkpoint(path: str | os.PathLike[str], sha256: str | None = None) -> Archive:
    """Read and check the file of a GTrXLPPO agent; arguments and errors as in `read_agent_archive`."""
    return read_agent_archive(path, "GTrXLPPO", {"policy", "optimizer"}, sha256)


@checkpoint_errors()
def read_settings(archive: Archive, agent: type[Any]) -> dict[str, Any]:
    """Return the constructor arguments stored in the file.

    Raises:
        CheckpointError: if the agent's class does not have a stored argument, or a value is invalid.
    """
    stored = stored_settings(archive, setting_rules(agent, setting_names(agent), BOUNDS))
    stored["core"] = TransformerSpec.from_dict(stored["core"])
    check_layers(stored["core"].distinct_layers, archive.tensors["policy"])
    for name in SCHEDULES:
        stored[name] = schedule_from_json(stored[name])
    return stored


def stored_policy_name(policy: type[GTrXLPolicy]) -> str:
    """Return the name of a policy class in a file; it has the module if it is that of another class here."""
    name = policy.__name__
    return name if POLICIES.get(name, policy) is policy else f"{policy.__module__}.{policy.__qualname__}"


@checkpoint_errors()
def policy_class_name(archive: Archive) -> str:
    """Return the name of the policy class.

    Raises:
        CheckpointError: if it is a user-defined class.
    """
    name = archive.documents["agent"]["policy"]
    if not isinstance(name, str):
        raise CheckpointError(f"policy must be the name of a class, got {name!r}")
    if name not in POLICIES:
        raise CheckpointError(f"the agent has a user-defined policy, {name}; pass policy={name} to load")
    return str(name)


@checkpoint_errors()
def decode_policy_kwargs(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the stored policy_kwargs with class names replaced by the classes.

    Raises:
        CheckpointError: if a value was a user-defined class or object.
    """
    return {name: _decode(value, f"policy_kwargs[{name!r}]") for name, value in stored.items()}


@checkpoint_errors()
def read_spaces(archive: Archive) -> tuple[Space[Any], Space[Any]]:
    """Return the observation and the action space of the agent's training."""
    stored = archive.documents["agent"]
    size = archive.tensor_bytes
    return space_from_json(stored["observation_space"], size), space_from_json(stored["action_space"], size)


def check_spaces_match(archive: Archive, observation_space: Space[Any], action_space: Space[Any]) -> None:
    """Raise ValueError unless an environment has the spaces of the checkpoint."""
    given = observation_space, action_space
    for kind, expected, actual in zip(("observation", "action"), read_spaces(archive), given, strict=True):
        if expected != actual:
            raise ValueError(
                f"the checkpoint was trained on another {kind} space: {describe_difference(expected, actual)}"
            )


def read_parameters(archive: Archive, policy: GTrXLPolicy) -> dict[str, Any]:
    """Return weights and optimizer state in the format of SB3's ``get_parameters``.

    Raises:
        CheckpointError: if the policy lacks a tensor or has it in a different shape, or if a parameter would
            make a recurrent state overflow.
    """
    check_weights_fit(policy, archive.tensors["policy"], "policy")
    check_stored_parameters(policy, archive.tensors["policy"])
    check_statistics(archive.tensors["policy"])
    state = stored_optimizer_state(policy.optimizer, archive)
    return {"policy": archive.tensors["policy"], OPTIMIZER: state}


def check_same_network(stored: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Check that arguments of ``load`` do not change the network in a file, apart from its core.

    Args:
        stored: arguments in the file by name.
        settings: arguments that replace them.

    Raises:
        ValueError: if one of them does; the message names the arguments that can be replaced.
    """
    length = (stored["core"].memory or NoMemory()).length
    changed = {
        name: stored[name]
        for name in WEIGHT_SETTINGS
        if isinstance(value := settings.get(name), bool | int | float) and bool(value) != bool(stored[name])
    }
    if "core" not in settings and settings.get("memory_length", length) not in (None, length):
        changed["memory_length"] = length
    if changed:
        name, before = next(iter(changed.items()))
        others = sorted(stored.keys() - {*WEIGHT_SETTINGS, "core", "policy_kwargs"})
        raise ValueError(
            f"the file cannot be loaded with {name}={settings[name]!r}, which is another network: it was "
            f"saved with {name}={before!r}; leave it out. Arguments that can be replaced: {', '.join(others)}"
        )


def setting_names(agent: type[Any]) -> list[str]:
    """Return the names of the constructor arguments stored in a file, given the class of an agent."""
    return [name for name in inspect.signature(agent.__init__).parameters if name not in NOT_SETTINGS]


def describe(
    settings: Mapping[str, Any], policy: GTrXLPolicy, progress: Mapping[str, Any], normalized: bool
) -> dict[str, Any]:
    """Return settings, spaces and progress of an agent as JSON data.

    Args:
        settings: constructor arguments by name, see `setting_names`.
        policy: policy of the agent.
        progress: values of `rlxf.agents.common.checkpoint.PROGRESS` by name.
        normalized: whether the observations of the training were normalized by a ``VecNormalize``.
    """
    values = dict(settings)
    values["core"] = settings["core"].to_dict()
    values["policy_kwargs"] = _encode(settings["policy_kwargs"])
    values |= {name: schedule_to_json(values[name]) for name in SCHEDULES}
    values = {name: _to_json_scalar(value) for name, value in values.items()}
    return {
        "name": "GTrXLPPO",
        "rlxf": VERSION,
        "policy": stored_policy_name(type(policy)),
        "settings": values,
        "observation_space": space_to_json(policy.observation_space),
        "action_space": space_to_json(policy.action_space),
        "progress": dict(progress),
        "normalized_observations": normalized,
    }


def _to_json_scalar(value: Any) -> Any:
    """Convert numpy scalars and paths to JSON types."""
    return os.fspath(value) if isinstance(value, os.PathLike) else to_builtin(value)


def _encode(value: Any) -> Any:
    value = _to_json_scalar(value)
    if isinstance(value, type) and CLASSES.get(value.__name__) is value:
        return {"class": value.__name__}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(part) for part in value]
    plain = value is None or isinstance(value, bool | int | str)
    return value if plain or (isinstance(value, float) and isfinite(value)) else {"lost": _name(value)}


def _name(value: Any) -> str:
    """Return the representation of an object without addresses in memory, which differ between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _decode(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_decode(part, where) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"lost"}:
        raise CheckpointError(
            f"{where} was {value['lost']}, which a file cannot hold; pass policy_kwargs=... to load"
        )
    if value.keys() == {"class"}:
        return CLASSES[value["class"]]
    return {key: _decode(part, f"{where}[{key!r}]") for key, part in value.items()}
