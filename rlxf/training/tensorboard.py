"""Values that TensorBoard alone can show, among the numbers that Stable-Baselines3's logger takes."""

from collections.abc import Mapping
from typing import Any

from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat
from torch.utils.tensorboard.summary import hparams

OTHERS = ("stdout", "log", "json", "csv")
"""SB3's other output formats: they raise at the sight of a figure, and spell arrays out."""


def writes_tensorboard(logger: Logger) -> bool:
    """Whether the logger writes TensorBoard events: if not, figures need not be drawn."""
    return any(isinstance(output, TensorBoardOutputFormat) for output in logger.output_formats)


def record_for_tensorboard(logger: Logger, tag: str, value: Any) -> None:
    """``logger.record`` of a `Figure` or an array, which becomes a histogram."""
    logger.record(tag, value, exclude=OTHERS)


def write_hyperparameters(logger: Logger, values: Mapping[str, bool | int | float | str]) -> None:
    """Write the hyper-parameters of a run for TensorBoard's HPARAMS tab, if the logger writes events.

    Only the start of a session is written. SB3's ``HParam`` also writes an "experiment", a list of columns;
    TensorBoard applies that of one run to all runs of a log folder, and so hides the hyper-parameters of
    agents of another kind. Without it TensorBoard shows the hyper-parameters and the scalars of all runs.
    """
    for output in logger.output_formats:
        if isinstance(output, TensorBoardOutputFormat):
            _, start, _ = hparams(dict(values), {})
            writer: Any = output.writer
            writer.file_writer.add_summary(start)
            writer.flush()
