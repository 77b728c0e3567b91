"""Resumption of training from a checkpoint, bitwise equal to an uninterrupted run."""

import os
from typing import TYPE_CHECKING

from torch import Tensor

from rlxf.agents.common.resume import (
    check_resumable,
    check_same_settings,
    check_unfinished,
    newest_checkpoint_file,
)
from rlxf.agents.decision_transformer import checkpoint
from rlxf.agents.offline.optimizer_step import OfflineUpdate
from rlxf.training import Archive, ResumeError
from rlxf.training.state_checks import RNG_GROUP, get_rng_states, set_rng_states

if TYPE_CHECKING:
    from rlxf.agents.offline.algorithm import OfflineAlgorithm


METRICS = "notes"
"""Name of the group of tensors with the metrics since the last log output."""


def resume_tensors(update: OfflineUpdate) -> dict[str, dict[str, Tensor]]:
    """Return the groups of tensors that resumption needs in addition to the agent."""
    notes = update.metrics()
    return {RNG_GROUP: get_rng_states()} | ({METRICS: notes} if notes else {})


def read_resumable_run(agent: "OfflineAlgorithm", path: str | os.PathLike[str], steps: int) -> Archive:
    """Read the checkpoint of an offline training run with the settings and data of this agent.

    Args:
        agent: agent with its dataset.
        path: path of the file, or of a folder of `CheckpointWriter`.
        steps: requested total number of updates, including those in the file.

    Raises:
        FileNotFoundError: if there is no file.
        CheckpointError: if it is damaged, of another format, or holds no generator states.
        ValueError: if its settings or data differ from the agent's, or the run has reached ``steps`` already.
    """
    archive = read_matching_run(agent, path)
    if "online" in archive.documents:
        raise ResumeError(
            f"{newest_checkpoint_file(path)} was written during learn_online: resume it with "
            f"learn_online(resume_from=...)"
        )
    done = archive.documents["agent"]["progress"]["num_timesteps"]
    check_unfinished(done, steps, "steps", newest_checkpoint_file(path))
    return archive


def read_matching_run(agent: "OfflineAlgorithm", path: str | os.PathLike[str]) -> Archive:
    """Read the checkpoint of a run with the settings and data of this agent, also if it is finished."""
    file = newest_checkpoint_file(path)
    archive = checkpoint.read(file, agent.NAME)
    check_resumable(archive, file)
    own, other = checkpoint.describe(agent), archive.documents["agent"]
    for kind in ("settings", "facts"):
        check_same_settings(own[kind], other[kind], file)
    return archive


def restore_training_state(update: OfflineUpdate, archive: Archive) -> None:
    """Restore the pending metrics and the random generators; call it last, just before training continues."""
    update.load_state(archive.tensors.get(METRICS, {}))
    set_rng_states(archive.tensors[RNG_GROUP])
