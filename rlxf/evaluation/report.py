"""What an evaluation found."""

import json
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from rich.table import Table
from stable_baselines3.common.logger import Logger
from torch.utils.tensorboard import SummaryWriter

from rlxf.evaluation.statistics import bootstrap_interval, interquartile_mean


@dataclass(frozen=True, eq=False)
class Report:
    """Returns of n episodes and what they say about the agent.

    Args:
        returns: float64 (n,), sum of the raw rewards of each episode, without discount.
        lengths: int64 (n,), steps of each episode.
        successes: bool (n,), ``info["is_success"]`` at the end of each episode; None if the
            environment does not report it.

    Raises:
        ValueError: if there is no episode, the arrays differ in length, or a return is NaN or infinite.
    """

    returns: np.ndarray
    lengths: np.ndarray
    successes: np.ndarray | None = None

    def __post_init__(self) -> None:
        arrays = [self.returns, self.lengths] + ([] if self.successes is None else [self.successes])
        shapes = [array.shape for array in arrays]
        if len(set(shapes)) != 1 or len(shapes[0]) != 1 or not self.episodes:
            raise ValueError(
                f"a report needs one value per episode and at least one episode, got shapes {shapes}"
            )
        if not np.isfinite(self.returns).all():
            raise ValueError(f"returns must be finite, got {self.returns[~np.isfinite(self.returns)][0]}")

    @property
    def episodes(self) -> int:
        """Number of episodes n."""
        return len(self.returns)

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """Standard deviation of the returns, divided by n as in SB3's ``evaluate_policy``."""
        return float(np.std(self.returns))

    @property
    def iqm(self) -> float:
        """Interquartile mean of the returns, see `interquartile_mean`."""
        return interquartile_mean(self.returns)

    @cached_property
    def ci(self) -> tuple[float, float]:
        """95% interval of the mean return, see `bootstrap_interval`. The same returns give the same one."""
        return bootstrap_interval(self.returns)

    @property
    def mean_length(self) -> float:
        """Mean steps of an episode."""
        return float(np.mean(self.lengths))

    @property
    def success_rate(self) -> float | None:
        """Successful episodes as a fraction of all; None if the environment does not report success."""
        return None if self.successes is None else float(np.mean(self.successes))

    def scalars(self) -> dict[str, float]:
        """TensorBoard tag -> value. Without ``eval/success_rate`` if that is None."""
        low, high = self.ci
        values = {
            "eval/mean_reward": self.mean,
            "eval/mean_ep_length": self.mean_length,
            "eval/success_rate": self.success_rate,
            "eval/iqm": self.iqm,
            "eval/ci_low": low,
            "eval/ci_high": high,
        }
        return {tag: value for tag, value in values.items() if value is not None}

    def log(self, logger: Logger | SummaryWriter, step: int) -> None:
        """Write `scalars` at ``step``, to an SB3 logger or to a TensorBoard writer, and flush them."""
        if isinstance(logger, Logger):
            self._dump(logger, step)
        else:
            self._add(logger, step)

    def to_json(self) -> str:
        """Episodes and statistics as JSON text."""
        successes = None if self.successes is None else self.successes.tolist()
        statistics = {
            "episodes": self.episodes,
            "mean": self.mean,
            "std": self.std,
            "iqm": self.iqm,
            "ci": list(self.ci),
            "mean_length": self.mean_length,
            "success_rate": self.success_rate,
        }
        every = {"returns": self.returns.tolist(), "lengths": self.lengths.tolist(), "successes": successes}
        return json.dumps(statistics | every, allow_nan=False)

    def table(self) -> Table:
        """For people: ``rich.print(report.table())``."""
        table = Table(title=f"Evaluation over {self.episodes} episodes", show_header=False)
        table.add_row("mean return", f"{self.mean:.4g} ± {self.std:.2g}")
        table.add_row("95% interval of the mean", "{:.4g} to {:.4g}".format(*self.ci))
        table.add_row("interquartile mean", f"{self.iqm:.4g}")
        table.add_row("mean episode length", f"{self.mean_length:.4g}")
        if self.success_rate is not None:
            table.add_row("success rate", f"{self.success_rate:.1%}")
        return table

    def _dump(self, logger: Logger, step: int) -> None:
        for tag, value in self.scalars().items():
            logger.record(tag, value)
        logger.record("time/total_timesteps", step, exclude="tensorboard")
        logger.dump(step)

    def _add(self, writer: SummaryWriter, step: int) -> None:
        for tag, value in self.scalars().items():
            writer.add_scalar(tag, value, step)
        writer.flush()
