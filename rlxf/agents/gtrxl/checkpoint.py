"""Checkpoint files of GTrXLPPO: contents, checks and loading."""

import inspect
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import Space
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN

from rlxf.agents.common.actions import action_encoder
from rlxf.agents.common.checkpoint import (
    PROGRESS,
    SEED,
    datastore_archive,
    read_agent_archive,
    read_datastore,
    save_archive,
    setting_rules,
    state_memory,
    stored_settings,
)
from rlxf.agents.common.weight_transfer import core_error_context
from rlxf.agents.gtrxl.policy import POLICIES
from rlxf.agents.gtrxl.retrieval import retrieval_policy
from rlxf.agents.gtrxl.value_head import check_statistics
from rlxf.attention import TransformerSpec
from rlxf.training import (
    Archive,
    CheckpointError,
    describe_difference,
    schedule_from_json,
    schedule_to_json,
    space_from_json,
    space_to_json,
)
from rlxf.training.compat import (
    MAPPING,
    NOTHING,
    VERSION,
    checkpoint_errors,
    checkpoint_errors_unless_overridden,
    number,
    whole,
)
from rlxf.training.state_checks import (
    check_buildable,
    check_layers,
    check_weights_fit,
    optimizer_state,
    optimizer_tensors,
)

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.policy import GTrXLPolicy
    from rlxf.agents.gtrxl.ppo import GTrXLPPO


SCHEDULES = ("learning_rate", "clip_range", "clip_range_vf", "ent_coef")
BOUNDS = {
    "n_steps": whole(1),
    "segment_length": whole(1),
    "batch_size": whole(1),
    "n_epochs": whole(1),
    "n_envs": whole(1),
    "gamma": number(0, 1),
    "gae_lambda": number(0, 1),
    "critic_lambda": number(0, 1) | NOTHING,
    "vf_coef": number(0),
    "max_grad_norm": number(above=0),
    "target_kl": number(above=0) | NOTHING,
    "advantage_epsilon": number(above=0),
    "reconstruction_coef": number(0),
    "stats_window_size": whole(1),
    "policy_kwargs": MAPPING,
    "seed": SEED,
    "verbose": whole(0),
}
"""Settings with a range; the annotations of the constructor define the other settings."""
NOT_SETTINGS = (
    *("self", "policy", "env", "memory_length", "tensorboard_log", "device", "_init_setup_model"),
)
"""Arguments of the constructor that are not stored as settings in a file."""
CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        FlattenExtractor,
        NatureCNN,
        CombinedExtractor,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.SGD,
    )
}
"""Classes that a file can store in policy_kwargs. Other classes must be passed again to ``load``."""


def build_archive(agent: "GTrXLPPO") -> Archive:
    """Return the contents of an agent's checkpoint; tensors are not copied."""
    tensors = {"policy": agent.policy.state_dict(), "optimizer": optimizer_tensors(agent.policy.optimizer)}
    datastore = datastore_archive(agent.datastore)
    return Archive({"agent": describe(agent)} | datastore.documents, tensors | datastore.tensors)


def save(agent: "GTrXLPPO", path: str | os.PathLike[str]) -> None:
    """Write the agent to a file atomically.

    Raises:
        OSError: if the disk is full or the folder is not writable; an existing file remains unchanged.
    """
    save_archive(build_archive(agent), path)


def read_checkpoint(path: str | os.PathLike[str], sha256: str | None = None) -> Archive:
    """Read and check the file of a GTrXLPPO agent; arguments and errors as in `read_agent_archive`."""
    return read_agent_archive(path, "GTrXLPPO", {"policy", "optimizer"}, sha256)


@checkpoint_errors()
def read_settings(archive: Archive, agent: type["GTrXLPPO"]) -> dict[str, Any]:
    """Return the constructor arguments stored in the file.

    Raises:
        CheckpointError: if the agent's class has no such argument, or a value is invalid.
    """
    stored = stored_settings(archive, setting_rules(agent, setting_names(agent), BOUNDS))
    stored["core"] = TransformerSpec.from_dict(stored["core"])
    check_layers(stored["core"].kinds, archive.tensors["policy"])
    for name in SCHEDULES:
        stored[name] = schedule_from_json(stored[name])
    return stored


@checkpoint_errors()
def policy_class(archive: Archive) -> str:
    """Return the name of the policy class.

    Raises:
        CheckpointError: if it is a user-defined class.
    """
    name = archive.documents["agent"]["policy"]
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
    stored, size = archive.documents["agent"], archive.tensor_bytes
    return space_from_json(stored["observation_space"], size), space_from_json(stored["action_space"], size)


def check_spaces_match(agent: "GTrXLPPO", archive: Archive) -> None:
    """Raise ValueError unless the environment has the spaces of the checkpoint."""
    given = agent.observation_space, agent.action_space
    for kind, expected, actual in zip(("observation", "action"), read_spaces(archive), given, strict=True):
        if expected != actual:
            raise ValueError(
                f"the checkpoint was trained on another {kind} space: {describe_difference(expected, actual)}"
            )


@checkpoint_errors()
def restore(agent: "GTrXLPPO", archive: Archive) -> None:
    """Load weights, optimizer state, progress and datastore of a file into an agent with the same settings.

    Raises:
        CheckpointError: if they do not fit.
    """
    agent.set_parameters(parameters(agent, archive))
    for name in PROGRESS:
        setattr(agent, name, archive.documents["agent"]["progress"][name])
    agent.normalized_observations = bool(archive.documents["agent"]["normalized_observations"])
    actions = action_encoder(agent.action_space)
    if (datastore := read_datastore(archive, agent.core.width, actions, agent.device)) is not None:
        agent.policy.retrieval = retrieval_policy(agent.policy, datastore)


def parameters(agent: "GTrXLPPO", archive: Archive) -> dict[str, Any]:
    """Return weights and optimizer state in the format of SB3's ``get_parameters``.

    Raises:
        CheckpointError: if the agent lacks a tensor or has it in another shape.
    """
    check_weights_fit(agent.policy, archive.tensors["policy"], "policy")
    check_statistics(archive.tensors["policy"])
    updates = archive.documents["agent"]["progress"]["_n_updates"]
    state = optimizer_state(agent.policy.optimizer, archive.tensors["optimizer"], updates)
    return {"policy": archive.tensors["policy"], "policy.optimizer": state}


def constructor_settings(agent: "GTrXLPPO") -> dict[str, Any]:
    """Return the constructor arguments by name, except policy, environment and device."""
    names = setting_names(type(agent))
    attributes = {"stats_window_size": "_stats_window_size", "n_envs": "n_envs_total"}
    return {name: getattr(agent, attributes.get(name, name)) for name in names}


def setting_names(agent: type["GTrXLPPO"]) -> list[str]:
    """Return the names of the constructor arguments stored in a file."""
    return [name for name in inspect.signature(agent.__init__).parameters if name not in NOT_SETTINGS]


def describe(agent: "GTrXLPPO") -> dict[str, Any]:
    """Return settings, spaces and progress as JSON data."""
    values = constructor_settings(agent)
    values["core"] = agent.core.to_dict()
    values["policy_kwargs"] = {name: _encode(value) for name, value in agent.policy_kwargs.items()}
    values |= {name: schedule_to_json(values[name]) for name in SCHEDULES}
    values = {name: _plain(value) for name, value in values.items()}
    return {
        "name": "GTrXLPPO",
        "rlxf": VERSION,
        "policy": agent.policy_class.__name__,
        "settings": values,
        "observation_space": space_to_json(agent.observation_space),
        "action_space": space_to_json(agent.action_space),
        "progress": {name: getattr(agent, name) for name in PROGRESS},
        "normalized_observations": agent.normalized_observations,
    }


def _plain(value: Any) -> Any:
    """Convert numpy scalars and paths to JSON types."""
    if isinstance(value, np.generic):
        return value.item()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _encode(value: Any) -> Any:
    value = _plain(value)
    if isinstance(value, type) and CLASSES.get(value.__name__) is value:
        return {"class": value.__name__}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(part) for part in value]
    plain = value is None or isinstance(value, bool | int | float | str)
    return value if plain else {"lost": repr(value)}


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


def load_agent(
    agent_class: "type[GTrXLPPO]",
    path: str | os.PathLike[str],
    env: Any,
    device: torch.device | str,
    policy: "str | type[GTrXLPolicy] | None",
    settings: dict[str, Any],
    sha256: str | None = None,
) -> Any:
    """Load an agent; arguments and errors are those of `GTrXLPPO.load`.

    Before any weight is allocated, the shapes required by the settings are compared with the tensors in the
    file. This check is skipped if ``policy`` or ``policy_kwargs`` are passed.
    """
    archive = read_checkpoint(path, sha256)
    own = read_settings(archive, agent_class)
    stored = own | settings
    if "policy_kwargs" not in settings:
        stored["policy_kwargs"] = decode_policy_kwargs(stored["policy_kwargs"])
    named = policy or policy_class(archive)
    given = [name for name, value in {"env": env, "policy": policy}.items() if value is not None]
    with core_error_context(own["core"], settings.get("core")):
        if not {"policy", "policy_kwargs"} & {*given, *settings}:
            with checkpoint_errors_unless_overridden(settings):
                check_buildable(
                    lambda: _weightless(agent_class, archive, named, stored),
                    archive.tensors["policy"],
                    {"acting with the core's memory": state_memory(stored["core"])},
                )
        with checkpoint_errors_unless_overridden([*given, *settings]):
            agent = _built(agent_class, archive, named, env, device, stored)
        restore(agent, archive)
    return agent


def _weightless(agent_class: "type[GTrXLPPO]", archive: Archive, policy: Any, stored: dict[str, Any]) -> Any:
    """Build only the policy, on the meta device."""
    return _built(agent_class, archive, policy, None, "meta", stored | {"verbose": 0}).policy


def _built(
    agent_class: "type[GTrXLPPO]",
    archive: Archive,
    policy: Any,
    env: Any,
    device: torch.device | str,
    stored: dict[str, Any],
) -> Any:
    """Build an agent with these settings and new weights."""
    agent = agent_class(policy, env, device=device, **stored, _init_setup_model=False)
    if env is None:
        agent.observation_space, agent.action_space = read_spaces(archive)
        agent.n_envs = agent.ranks.part("n_envs", stored["n_envs"])
    check_spaces_match(agent, archive)
    agent._setup_model()
    return agent
