"""Resumption of training from a checkpoint, bitwise equal to an uninterrupted run."""

import os
from typing import TYPE_CHECKING

from torch import Tensor

from rlxf.agents.decision_transformer import checkpoint
from rlxf.agents.decision_transformer.update import Update
from rlxf.agents.resuming import check_alike, check_resumable, check_unfinished, newest_file
from rlxf.training import Archive, ResumeError
from rlxf.training.randomness import GROUP, generator_states, set_generator_states

if TYPE_CHECKING:
    from rlxf.agents.decision_transformer.window_learner import WindowLearner

NOTES = "notes"
"""Name of the group of tensors with the metrics since the last log output."""


def resumption(update: Update) -> dict[str, dict[str, Tensor]]:
    """Return the groups of tensors that resumption needs in addition to the agent."""
    notes = update.notes()
    return {GROUP: generator_states()} | ({NOTES: notes} if notes else {})


def read_run(agent: "WindowLearner", path: str | os.PathLike[str], steps: int) -> Archive:
    """Read the checkpoint of an offline training run with the settings and data of this agent.

    Args:
        agent: agent with its dataset.
        path: path of the file, or of a folder of `Checkpoints`.
        steps: requested total number of updates, including those in the file.

    Raises:
        FileNotFoundError: if there is no file.
        CheckpointError: if it is damaged, of another format, or holds no generator states.
        ValueError: if its settings or data differ from the agent's, or the run has reached ``steps`` already.
    """
    archive = read_alike(agent, path)
    if "online" in archive.documents:
        raise ResumeError(
            f"{newest_file(path)} was written during learn_online: resume it with "
            f"learn_online(resume_from=...)"
        )
    done = archive.documents["agent"]["progress"]["num_timesteps"]
    check_unfinished(done, steps, "steps", newest_file(path))
    return archive


def read_alike(agent: "WindowLearner", path: str | os.PathLike[str]) -> Archive:
    """Read the checkpoint of a run with the settings and data of this agent, also if it is finished."""
    file = newest_file(path)
    archive = checkpoint.read(file, agent.NAME)
    check_resumable(archive, file)
    own, other = checkpoint.describe(agent), archive.documents["agent"]
    for kind in ("settings", "facts"):
        check_alike(own[kind], other[kind], file)
    return archive


def go_on(update: Update, archive: Archive) -> None:
    """Restore the pending metrics and the random generators; call it last, just before training continues."""
    update.take_up(archive.tensors.get(NOTES, {}))
    set_generator_states(archive.tensors[GROUP])
