"""Values that TensorBoard alone can show, among the numbers that Stable-Baselines3's logger takes."""

from typing import Any

from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat

OTHERS = ("stdout", "log", "json", "csv")
"""SB3's other output formats: they raise at the sight of a figure, and spell arrays out."""


def writes_tensorboard(logger: Logger) -> bool:
    """Whether the logger writes TensorBoard events: if not, figures need not be drawn."""
    return any(isinstance(output, TensorBoardOutputFormat) for output in logger.output_formats)


def record_for_tensorboard(logger: Logger, tag: str, value: Any) -> None:
    """``logger.record`` of an `HParam`, a `Figure` or an array, which becomes a histogram."""
    logger.record(tag, value, exclude=OTHERS)
