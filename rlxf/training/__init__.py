"""Checkpoint files, run folders, logs, schedules, serialization of spaces, and distributed training."""

from rlxf.training.archive import Archive, read_archive, write_archive
from rlxf.training.atomic import atomic_write
from rlxf.training.checkpoints import CheckpointFolder, Checkpoints
from rlxf.training.errors import CheckpointError, NumericalError, ResumeError
from rlxf.training.normalizer import load_normalizer, save_normalizer
from rlxf.training.run_folder import RunFolder
from rlxf.training.schedules import (
    CosineSchedule,
    LostSchedule,
    Schedule,
    linear,
    parse_schedule,
    schedule_from_json,
    schedule_to_json,
    schedule_to_text,
)
from rlxf.training.space_difference import describe_difference
from rlxf.training.spaces import space_from_json, space_to_json
from rlxf.training.stopping import stop_on_signals
from rlxf.utils.memory_budget import memory_budget

__all__ = [
    "Archive",
    "read_archive",
    "write_archive",
    "CheckpointError",
    "NumericalError",
    "ResumeError",
    "CheckpointFolder",
    "Checkpoints",
    "atomic_write",
    "RunFolder",
    "load_normalizer",
    "save_normalizer",
    "Schedule",
    "CosineSchedule",
    "LostSchedule",
    "linear",
    "parse_schedule",
    "schedule_from_json",
    "schedule_to_json",
    "schedule_to_text",
    "describe_difference",
    "space_from_json",
    "space_to_json",
    "stop_on_signals",
    "memory_budget",
]
