"""Training that goes on from a file, to the same bits as if it had never ended."""

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
"""Tensors of what updates showed since the last line of the log."""


def resumption(update: Update) -> dict[str, dict[str, Tensor]]:
    """What a file holds for resuming, beside the agent: by group, by name."""
    notes = update.notes()
    return {GROUP: generator_states()} | ({NOTES: notes} if notes else {})


def read_run(agent: "WindowLearner", path: str | os.PathLike[str], steps: int) -> Archive:
    """The file of a run that this agent began alike, or could have begun.

    Args:
        agent: with its data.
        path: of the file, or of a folder of `Checkpoints`.
        steps: updates that the agent is asked for, those in the file included.

    Raises:
        FileNotFoundError: if there is no file.
        CheckpointError: if it is damaged, foreign, or holds no states of generators.
        ValueError: if its settings or data differ from the agent's, or it has so many updates already.
    """
    archive = read_alike(agent, path)
    if "online" in archive.documents:
        raise ResumeError(f"{newest_file(path)} was written during learn_online: resume it there")
    done = archive.documents["agent"]["progress"]["num_timesteps"]
    check_unfinished(done, steps, "steps", newest_file(path))
    return archive


def read_alike(agent: "WindowLearner", path: str | os.PathLike[str]) -> Archive:
    """Read a run like `read_run`, even if no updates are left."""
    file = newest_file(path)
    archive = checkpoint.read(file, agent.NAME)
    check_resumable(archive, file)
    own, other = checkpoint.describe(agent), archive.documents["agent"]
    for kind in ("settings", "facts"):
        check_alike(own[kind], other[kind], file)
    return archive


def go_on(update: Update, archive: Archive) -> None:
    """Draw and note from here on as the run in the file would have; to be called last."""
    update.take_up(archive.tensors.get(NOTES, {}))
    set_generator_states(archive.tensors[GROUP])
