"""TensorBoard events of a logger of Stable-Baselines3."""

from typing import Any

from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat
from torch.utils.tensorboard import SummaryWriter

OTHER_FORMATS = ("stdout", "log", "json", "csv")
"""SB3's other output formats: they raise an error for figures, and print arrays element by element."""


def writers(logger: Logger) -> list[SummaryWriter]:
    """Return the TensorBoard writers of a logger."""
    outputs = logger.output_formats
    return [output.writer for output in outputs if isinstance(output, TensorBoardOutputFormat)]


def writes_tensorboard(logger: Logger) -> bool:
    """Return whether the logger writes TensorBoard events."""
    return bool(writers(logger))


def record_for_tensorboard(logger: Logger, tag: str, value: Any) -> None:
    """Record a `Figure`, a text or an array (as a histogram) for TensorBoard only."""
    logger.record(tag, value, exclude=OTHER_FORMATS)
