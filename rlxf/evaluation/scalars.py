"""Writing of scalars to loggers."""

from stable_baselines3.common.logger import Logger
from torch.utils.tensorboard import SummaryWriter


def write_scalars(scalars: dict[str, float], logger: Logger | SummaryWriter, step: int) -> None:
    """Write the value of each tag at ``step`` to an SB3 logger or a TensorBoard writer, and flush it."""
    if isinstance(logger, Logger):
        _dump(scalars, logger, step)
    else:
        _add(scalars, logger, step)


def _dump(scalars: dict[str, float], logger: Logger, step: int) -> None:
    for tag, value in scalars.items():
        logger.record(tag, value)
    logger.record("time/total_timesteps", step, exclude="tensorboard")
    logger.dump(step)


def _add(scalars: dict[str, float], writer: SummaryWriter, step: int) -> None:
    for tag, value in scalars.items():
        writer.add_scalar(tag, value, step)
    writer.flush()
