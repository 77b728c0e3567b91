"""Training that goes on from a file, to the same bits as if it had never ended."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from rlxf.agents.decision_transformer import checkpoint
from rlxf.agents.decision_transformer.update import Update
from rlxf.training import Archive, CheckpointError, CheckpointFolder
from rlxf.training.plain_json import dump_json, load_json
from rlxf.training.randomness import GROUP, generator_states, set_generator_states

if TYPE_CHECKING:
    from rlxf.agents.decision_transformer.window_learner import WindowLearner

NOTES = "notes"
"""Tensors of what updates showed since the last line of the log."""
FREE = {"tensorboard_log"}
"""Settings that may differ: where the log is."""


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
    path = CheckpointFolder(Path(path)).newest() if Path(path).is_dir() else path
    archive = checkpoint.read(path, agent.NAME)
    if GROUP not in archive.tensors:
        raise CheckpointError(
            f"{path} is of an older rlxf, which kept no generators: load it and learn on from there"
        )
    _check_alike(agent, archive, path)
    done = archive.documents["agent"]["progress"]["num_timesteps"]
    if steps <= done:
        raise ValueError(f"{path} has {done} updates already, got steps={steps}; ask for more to go on")
    return archive


def go_on(update: Update, archive: Archive) -> None:
    """Draw and note from here on as the run in the file would have; to be called last."""
    update.take_up(archive.tensors.get(NOTES, {}))
    set_generator_states(archive.tensors[GROUP])


def _check_alike(agent: "WindowLearner", archive: Archive, path: str | os.PathLike[str]) -> None:
    described = load_json(dump_json(checkpoint.describe(agent)))
    for kind in ("settings", "facts"):
        own, other = described[kind], archive.documents["agent"][kind]
        for name in sorted((own.keys() | other.keys()) - FREE):
            if own.get(name) != other.get(name):
                raise ValueError(
                    f"{path} cannot be resumed here: its {name} is {other.get(name)}, the agent's "
                    f"{own.get(name)}; build the agent as the run's, from the same data"
                )
