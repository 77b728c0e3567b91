"""Checkpoint files of both agents: common content, checks, memory estimates and resumption."""

import inspect
import os
from abc import abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from torch.optim import Optimizer

from rlxf.attention import TransformerSpec
from rlxf.attention.memory.base import State
from rlxf.training.archive import Archive, read_archive, write_archive
from rlxf.training.checkpoints import CheckpointFolder, clone_tensors
from rlxf.training.compat import check_known
from rlxf.training.file_contents import check_not_a_folder, wrong_content_error
from rlxf.training.json_rules import NOTHING, Rule, check_fields, first_difference, number, rule_of, whole
from rlxf.training.states import OPTIMIZER_GROUP, RNG_GROUP, optimizer_state
from rlxf.training.strict_json import dump_json, load_json
from rlxf.utils.errors import CheckpointError, ResumeError
from rlxf.utils.files import make_folder

EXCLUDED = "excluded"
"""Key in the description of an agent: names of the parts that its file leaves out."""
MAX_NUMPY_SEED = 2**32 - 1
"""Largest seed that NumPy accepts."""
SEED_VALUE = whole(0, MAX_NUMPY_SEED)
SEED_RULE = SEED_VALUE | NOTHING
"""Validation rule of a seed in a file."""
PROGRESS = {
    "num_timesteps": whole(0),
    "_total_timesteps": whole(0),
    "_n_updates": whole(0),
    "_current_progress_remaining": number(most=1),
}
"""Progress attributes of the agent; the last one is negative if a rollout exceeded the total steps."""
OPTIMIZER = "policy.optimizer"
"""Name of the optimizer in SB3's ``get_parameters`` and in the ``exclude`` of ``save``."""


class CheckpointedAlgorithm(BaseAlgorithm):
    """SB3 ``BaseAlgorithm`` that is saved to a file, or copied to memory, in the format of `Archive`."""

    @abstractmethod
    def _description(self) -> dict[str, Any]:
        """Return name, settings, spaces or dataset information, and progress as JSON data."""

    @abstractmethod
    def _checkpoint(self) -> Archive:
        """Return the content of `save`; tensors are not copied."""

    @abstractmethod
    def _restore(self, archive: Archive) -> None:
        """Load the content of `save` of an agent with the same settings.

        Raises:
            CheckpointError: if it does not fit the agent.
        """

    def save(  # type: ignore[override]
        self,
        path: str | os.PathLike[str],
        exclude: Collection[str] | None = None,
        include: Collection[str] | None = None,
    ) -> None:
        """Save settings, weights, optimizer state, progress and datastore to one file, atomically.

        The file is a zip of JSON and safetensors with a checksum of each. It contains no executable code and
        no training data.

        Args:
            path: path of the file; ".zip" is added if it has no suffix, and missing folders are created.
            exclude: ``["policy.optimizer"]`` leaves out the state of the optimizer, which is two thirds of
                the file with Adam. The loaded agent acts equally; further training starts with a new
                optimizer state.
            include: argument of SB3 that is not supported; leave it out.

        Raises:
            OSError: if the file cannot be written, e.g. the disk is full; an existing file stays unchanged.
            ValueError: if exclude has another name, or include is given.
        """
        if include is not None or set(exclude or ()) - {OPTIMIZER}:
            raise ValueError(
                f"a checkpoint contains the whole agent except for exclude=[{OPTIMIZER!r}], got "
                f"exclude={exclude!r} and include={include!r}"
            )
        file = checkpoint_path(path)
        archive = self._checkpoint()
        if exclude:
            archive = _without_optimizer(archive)
        make_folder(file.parent, exist_ok=True)
        write_archive(file, archive.documents, archive.tensors)

    def snapshot(self) -> Archive:
        """Return a copy of the content of `save`. For `rlxf.training.CheckpointWriter`."""
        archive = self._checkpoint()
        return Archive(archive.documents, clone_tensors(archive.tensors))

    def _progress(self) -> dict[str, Any]:
        """Return the values of `PROGRESS` by name."""
        return {name: getattr(self, name) for name in PROGRESS}

    def _restore_progress(self, archive: Archive) -> None:
        """Restore the values of `PROGRESS`."""
        stored = archive.documents["agent"]["progress"]
        vars(self).update({name: stored[name] for name in PROGRESS})


def _without_optimizer(archive: Archive) -> Archive:
    agent = archive.documents["agent"] | {EXCLUDED: [OPTIMIZER]}
    tensors = {name: group for name, group in archive.tensors.items() if name != OPTIMIZER_GROUP}
    return Archive(archive.documents | {"agent": agent}, tensors)


def excludes_optimizer(archive: Archive) -> bool:
    """Return whether a checkpoint was saved without the state of the optimizer."""
    return EXCLUDED in archive.documents["agent"]


def stored_optimizer_state(optimizer: Optimizer, archive: Archive) -> dict[str, Any]:
    """Return the optimizer state in a checkpoint, for ``optimizer.load_state_dict``.

    It is that of a new optimizer if the checkpoint excludes the state. Errors are those of `optimizer_state`.
    """
    if excludes_optimizer(archive):
        return optimizer_state(optimizer, {})
    updates = archive.documents["agent"]["progress"]["_n_updates"]
    return optimizer_state(optimizer, archive.tensors[OPTIMIZER_GROUP], updates)


def setting_rules(agent: type[Any], names: Collection[str], bounds: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the validation rule of each setting in a file.

    Args:
        agent: class of the agent, or of its configuration.
        names: names of the stored settings, which are arguments of its constructor.
        bounds: rules of settings with a range; the other rules follow from the type annotations.
    """
    arguments = inspect.signature(agent).parameters
    return {name: bounds.get(name) or rule_of(arguments[name].annotation) for name in names}


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path``, with ".zip" added if it has no suffix, as in SB3.

    Raises:
        ValueError: if the path has no name, as an empty one.
    """
    file = Path(path)
    if file.name in ("", ".."):
        raise ValueError(f"{os.fspath(path)!r} names no file: give a path such as 'agent.zip'")
    return file if file.suffix else file.with_suffix(".zip")


def read_agent_archive(
    path: str | os.PathLike[str], name: str, groups: Collection[str], sha256: str | None = None
) -> Archive:
    """Read and check the checkpoint of an agent.

    Args:
        path: path of the file; ".zip" is added if it has no suffix.
        name: name of the algorithm that the file must hold.
        groups: names of the tensor groups that the file must hold.
        sha256: required SHA-256 of the file; None to accept any file.

    Raises:
        FileNotFoundError: if the file does not exist.
        IsADirectoryError: if the path is a folder.
        CheckpointError: if the file is truncated, altered, or not a checkpoint of an agent of this name.
    """
    file = checkpoint_path(path)
    check_not_a_folder(path, file)
    archive = read_archive(file, sha256=sha256)
    agent: Any = archive.documents.get("agent")
    named = isinstance(agent, dict) and agent.get("name") == name
    if not named or not _has_groups(archive, groups):
        raise wrong_content_error(file, archive, f"{name} agent")
    check_fields(agent.get("settings"), {}, "settings")
    check_fields(agent.get("progress"), PROGRESS, "progress")
    return archive


def _has_groups(archive: Archive, groups: Collection[str]) -> bool:
    """Return whether a file has the groups of tensors of an agent, without those that it leaves out."""
    if not excludes_optimizer(archive):
        return archive.tensors.keys() >= set(groups)
    whole = archive.documents["agent"][EXCLUDED] == [OPTIMIZER] and OPTIMIZER_GROUP not in archive.tensors
    return whole and archive.tensors.keys() >= set(groups) - {OPTIMIZER_GROUP}


def stored_settings(
    archive: Archive, rules: Mapping[str, Rule], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the settings in a checkpoint as JSON data.

    Args:
        archive: result of `read_agent_archive`.
        rules: rules by name of the setting.
        defaults: values of settings that the file may leave out.

    Raises:
        CheckpointError: if a setting is missing, unknown or breaks its rule.
    """
    agent = archive.documents["agent"]
    check_known(agent["settings"], list(rules), agent.get("rlxf"))
    settings = {**(defaults or {}), **agent["settings"]}
    check_fields(settings, rules, "settings")
    return settings


CACHE_COPIES = 8
"""Bytes needed to act per byte of a state: keys, values and distance tables, and their copies."""
STEP_COPIES = 4
"""Bytes needed to act per byte of a context window: the window, its copy shifted by a step, its tokens."""
NUMBER_BYTES = 8
"""Upper estimate of the bytes of a number."""
INDEX_NUMBERS = 32
"""Additional numbers per step: return, time step, mask, and positions and masks of its tokens."""


def state_memory(core: TransformerSpec) -> int:
    """Return an upper estimate of the bytes of a core's memory for one environment while it acts."""
    like = torch.empty(0, device="meta")
    memory = None if core.memory is None else core.memory.empty(core.layers, 1, like, core.width)
    return CACHE_COPIES * (_bytes(memory) + _recurrent_bytes(core))


def window_memory(steps: int, numbers: int, width: int) -> int:
    """Return an upper estimate of the bytes of a context window of one environment.

    Args:
        steps: length of the window.
        numbers: size of an encoded observation plus an encoded action.
        width: features of a token; a step has three tokens.
    """
    return STEP_COPIES * NUMBER_BYTES * steps * (numbers + 3 * width + INDEX_NUMBERS)


def _recurrent_bytes(core: TransformerSpec) -> int:
    """Return the bytes of the states of recurrent passes and memory for one environment."""
    like = torch.empty(0, device="meta")
    carry = {} if core.memory is None else core.memory.initial_carry(core.layers, 1, like, core.width)
    stored = sum(x.nbytes for x in carry.values())
    if core.recurrence is None:
        return stored
    with torch.device("meta"):
        state = core.recurrence.build(core.width, core.heads).initial_state(1)
    return stored + core.layers * sum(x.nbytes for x in state.values())


def _bytes(state: State | None) -> int:
    if state is None:
        return 0
    index = state.index.position.nbytes + state.index.episode.nbytes
    return state.hidden.nbytes + index + _bytes(state.older)


def newest_checkpoint_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file itself, or the newest complete file of a folder of `CheckpointWriter`.

    Raises:
        FileNotFoundError: if the folder has no complete file.
    """
    return CheckpointFolder(path).newest() if Path(path).is_dir() else Path(path)


def check_resumable(archive: Archive, path: Path) -> None:
    """Raise CheckpointError unless the file has the optimizer and random generators of a training run."""
    if excludes_optimizer(archive):
        raise CheckpointError(
            f"{path} was saved with exclude=[{OPTIMIZER!r}], so a training cannot be resumed exactly. Load "
            f"the agent and call learn() instead"
        )
    if RNG_GROUP not in archive.tensors:
        raise CheckpointError(
            f"{path} was written by save(), not by CheckpointWriter, and holds no states of random number "
            f"generators, so a training cannot be resumed exactly. Load the agent and call learn() instead"
        )


def check_same_settings(own: Mapping[str, Any], other: Mapping[str, Any], path: Path) -> None:
    """Raise ResumeError unless an agent has the settings of the one in a file; name the first difference.

    Args:
        own: settings of the agent.
        other: settings in the file.
        path: path of the file, for the message.
    """
    own = load_json(dump_json(own))
    for name in sorted(own.keys() | other.keys()):
        if difference := first_difference(name, other.get(name), own.get(name)):
            place, stored, current = difference
            raise ResumeError(
                f"{path} cannot be resumed here: its {place} is {stored}, the agent's {current}; build "
                f"the agent with the arguments and the data of the run"
            )


def check_unfinished(done: int, wanted: int, what: str, path: Path) -> None:
    """Raise ResumeError if the run in a file has reached its target already.

    Args:
        done: progress of the run in the file.
        wanted: progress to reach in total.
        what: name of the argument that sets the target, for the message.
        path: path of the file, for the message.
    """
    if wanted <= done:
        raise ResumeError(
            f"the run in {path} has reached {done} already, got {what}={wanted}; use a larger {what} to "
            f"continue"
        )
