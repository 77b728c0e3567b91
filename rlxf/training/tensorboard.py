"""Logging of figures, histograms and hyperparameters to TensorBoard through SB3's logger."""

from collections.abc import Mapping
from typing import Any

from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat
from torch.utils.tensorboard.summary import hparams

OTHERS = ("stdout", "log", "json", "csv")
"""SB3's other output formats: they raise an error for figures, and print arrays element by element."""


def writes_tensorboard(logger: Logger) -> bool:
    """Return whether the logger writes TensorBoard events."""
    return any(isinstance(output, TensorBoardOutputFormat) for output in logger.output_formats)


def record_for_tensorboard(logger: Logger, tag: str, value: Any) -> None:
    """Record a `Figure` or an array (as a histogram) for TensorBoard only."""
    logger.record(tag, value, exclude=OTHERS)


def write_hyperparameters(logger: Logger, values: Mapping[str, bool | int | float | str]) -> None:
    """Write the hyperparameters of a run for TensorBoard's HPARAMS tab, if the logger writes events.

    This function only writes the session start summary. SB3's ``HParam`` also writes an experiment summary,
    which lists columns. TensorBoard applies the experiment summary of one run to all runs of a log folder,
    which hides the hyperparameters of other agents. Without it, TensorBoard shows the hyperparameters and
    scalars of all runs.
    """
    for output in logger.output_formats:
        if isinstance(output, TensorBoardOutputFormat):
            _, start, _ = hparams(dict(values), {})
            writer: Any = output.writer
            writer.file_writer.add_summary(start)
            writer.flush()
