"""Checkpoint files, run folders, logs, schedules, serialization of spaces, and distributed training."""

from typing import TYPE_CHECKING

from rlxf.utils.lazy_names import lazy_attributes, modules_by_name

if TYPE_CHECKING:  # so that editors and type checkers know the lazy names
    from rlxf.training.archive import Archive, read_archive, write_archive
    from rlxf.training.checkpoints import CheckpointFolder, CheckpointWriter
    from rlxf.training.normalizer import load_normalizer, save_normalizer
    from rlxf.training.run_folder import RunFolder
    from rlxf.training.schedules import (
        CosineSchedule,
        Schedule,
        UnknownSchedule,
        linear,
        parse_schedule,
        schedule_from_json,
        schedule_to_json,
        schedule_to_text,
    )
    from rlxf.training.spaces import describe_difference, space_from_json, space_to_json
    from rlxf.utils.errors import CheckpointError, NumericalError, ResumeError
    from rlxf.utils.files import atomic_write
    from rlxf.utils.memory_budget import memory_budget
    from rlxf.utils.signals import stop_on_signals

__all__ = [
    "Archive",
    "read_archive",
    "write_archive",
    "CheckpointError",
    "NumericalError",
    "ResumeError",
    "CheckpointFolder",
    "CheckpointWriter",
    "atomic_write",
    "RunFolder",
    "load_normalizer",
    "save_normalizer",
    "Schedule",
    "CosineSchedule",
    "UnknownSchedule",
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

_MODULES = modules_by_name(
    {
        "rlxf.training.archive": ("Archive", "read_archive", "write_archive"),
        "rlxf.training.checkpoints": ("CheckpointFolder", "CheckpointWriter"),
        "rlxf.training.normalizer": ("load_normalizer", "save_normalizer"),
        "rlxf.training.run_folder": ("RunFolder",),
        "rlxf.training.schedules": (
            "CosineSchedule",
            "Schedule",
            "UnknownSchedule",
            "linear",
            "parse_schedule",
            "schedule_from_json",
            "schedule_to_json",
            "schedule_to_text",
        ),
        "rlxf.training.spaces": ("describe_difference", "space_from_json", "space_to_json"),
        "rlxf.utils.errors": ("CheckpointError", "NumericalError", "ResumeError"),
        "rlxf.utils.files": ("atomic_write",),
        "rlxf.utils.memory_budget": ("memory_budget",),
        "rlxf.utils.signals": ("stop_on_signals",),
    }
)

if not TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__, __dir__ = lazy_attributes(globals(), _MODULES)
