"""Names of the files in the folder of a run, and of entries in them."""

import re
from pathlib import Path

CONFIG = "config.json"
"""Options of the command that started the run."""
PROGRAM = "program"
"""Key in ``config.json`` with the name of the program that started a run, if it was not rlxf."""
TEACHER = "teacher"
"""Key in the ``config.json`` of a student with the folder of its teacher."""
BASELINE = "rlxf baseline"
"""Program that trains agents of Stable-Baselines3, and saves no agent."""
PROGRESS = "progress.csv"
"""Log of the training."""
MEAN_RETURN = "eval/mean_reward"
"""Column of this log with the mean returns of evaluations."""
CHECKPOINT, BEST, BEST_VALIDATION = "checkpoint.zip", "best.zip", "best-validation.zip"
"""Agents: the last one, and those with the best evaluation and the lowest validation loss."""
NORMALIZER, BEST_NORMALIZER = "normalizer.zip", "best-normalizer.zip"
"""Statistics of ``VecNormalize`` for the last agent, and for the one with the best evaluation."""
CHECKPOINT_FOLDER = "checkpoints"
"""Folder of the periodic checkpoints."""
EVALUATION = "evaluation.json"
"""Episodes and statistics of the final evaluation."""
COMPLETED = "completed.json"
"""Marker that is written when the run is complete."""
SHARED = "shared.json"
"""File in a shared folder with the name of the checkpoint that ``checkpoint.zip`` is, unless it is the last
one: ``{"checkpoint": "best"}``."""
_PERIODIC_CHECKPOINT = re.compile(r"step-\d{12}\.zip")


def checkpoint_name(step: int) -> str:
    """Return the name of the periodic checkpoint after ``step`` steps."""
    return f"step-{step:012d}.zip"


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the paths of all periodic checkpoints in a folder, the oldest first."""
    return sorted(file for file in folder.glob("step-*.zip") if _PERIODIC_CHECKPOINT.fullmatch(file.name))
