"""Writing of figures to TensorBoard."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from stable_baselines3.common.logger import Figure, Logger, TensorBoardOutputFormat
from torch.utils.tensorboard import SummaryWriter

if TYPE_CHECKING:
    from matplotlib import figure

OTHERS = ("stdout", "log", "json", "csv")
"""SB3's output formats that do not support figures and raise an error."""


def write_figure(
    draw: "Callable[[], figure.Figure]", tag: str, logger: Logger | SummaryWriter, step: int
) -> None:
    """Write a figure to TensorBoard's images at ``step``. An SB3 logger writes it at its next ``dump``.

    Without TensorBoard, ``draw`` is not called.
    """
    if isinstance(logger, SummaryWriter):
        logger.add_figure(tag, draw(), step, close=False)
    elif any(isinstance(output, TensorBoardOutputFormat) for output in logger.output_formats):
        logger.record(tag, Figure(draw(), close=False), exclude=OTHERS)
