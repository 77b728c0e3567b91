"""Report of an evaluation: returns, intervals, and scalars for the log."""

import json
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
import scipy  # its submodules load lazily; scipy.stats takes a second
from stable_baselines3.common.logger import Logger
from torch.utils.tensorboard import SummaryWriter

from rlxf.data.reference_scores import ReferenceScores
from rlxf.utils.tables import Table, Tabular

CONFIDENCE = 0.95
RESAMPLES = 9999
_BATCH_NUMBERS = 2**20  # numbers resampled at a time: 8 MiB whatever the number of returns


def interquartile_mean(x: np.ndarray) -> float:
    """Return the mean of x (n,) without its floor(n / 4) smallest and floor(n / 4) largest values.

    It is robust to outliers and needs fewer samples than the median.

    Source: Agarwal et al. 2021, arXiv:2108.13264, section 4.3.
    """
    return float(scipy.stats.trim_mean(x, 0.25))


def bootstrap_interval(x: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval (low, high) of the mean of x (n,), low <= mean <= high.

    The interval excludes the lowest and the highest 2.5% of the means of 9,999 samples, each of n values
    drawn from x with replacement. Equal values, or a single value, give an interval of width 0.

    Source: Efron 1979, "Bootstrap methods: another look at the jackknife".

    Args:
        x: values, at least one.
        seed: seed of the samples.
    """
    mean = float(np.mean(x))
    if np.ptp(x) == 0:
        return mean, mean
    result = scipy.stats.bootstrap(
        (x,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=max(1, _BATCH_NUMBERS // len(x)),
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = result.confidence_interval
    # Rounding errors may put the mean of nearly equal values outside the interval.
    return min(float(low), mean), max(float(high), mean)


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


@dataclass(frozen=True, eq=False, repr=False)
class Report(Tabular):
    """Returns of n episodes and their statistics.

    ``print(report)`` shows one line, ``print(report.table())`` and notebooks the table.

    Args:
        returns: float64 (n,), undiscounted sum of the raw rewards of each episode.
        lengths: int64 (n,), number of steps of each episode.
        successes: bool (n,), ``info["is_success"]`` at the end of each episode; None if the
            environment does not report it.
        references: returns with normalized scores 0 and 100; None if unknown.

    Raises:
        ValueError: if there is no episode, the arrays differ in length, or a return is NaN or infinite.
    """

    returns: np.ndarray
    lengths: np.ndarray
    successes: np.ndarray | None = None
    references: ReferenceScores | None = None

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
        """95% confidence interval of the mean return, see `bootstrap_interval`; deterministic."""
        return bootstrap_interval(self.returns)

    @property
    def mean_length(self) -> float:
        """Mean number of steps of an episode."""
        return float(np.mean(self.lengths))

    @property
    def success_rate(self) -> float | None:
        """Fraction of successful episodes; None if the environment does not report success."""
        return None if self.successes is None else float(np.mean(self.successes))

    @property
    def normalized_score(self) -> float | None:
        """Mean return normalized with the reference scores (`ReferenceScores.normalize`), or None."""
        return None if self.references is None else float(self.references.normalize(self.mean))

    def scalars(self) -> dict[str, float]:
        """Return the value of each TensorBoard tag; success rate and normalized score only if not None."""
        low, high = self.ci
        values = {
            "eval/mean_reward": self.mean,
            "eval/mean_ep_length": self.mean_length,
            "eval/success_rate": self.success_rate,
            "eval/iqm": self.iqm,
            "eval/ci_low": low,
            "eval/ci_high": high,
            "eval/normalized_score": self.normalized_score,
        }
        return {tag: value for tag, value in values.items() if value is not None}

    def log(self, logger: Logger | SummaryWriter, step: int) -> None:
        """Write `scalars` at ``step`` to an SB3 logger or a TensorBoard writer, and flush it."""
        write_scalars(self.scalars(), logger, step)

    def to_json(self) -> str:
        """Return episodes and statistics as JSON text."""
        successes = None if self.successes is None else self.successes.tolist()
        statistics = {
            "episodes": self.episodes,
            "mean": self.mean,
            "std": self.std,
            "iqm": self.iqm,
            "ci": list(self.ci),
            "mean_length": self.mean_length,
            "success_rate": self.success_rate,
            "normalized_score": self.normalized_score,
            "references": None if self.references is None else asdict(self.references),
        }
        arrays = {
            "returns": self.returns.tolist(),
            "lengths": self.lengths.tolist(),
            "successes": successes,
        }
        return json.dumps(statistics | arrays, allow_nan=False)

    def __str__(self) -> str:
        """Return mean, interval and success rate in one line, e.g. for ``print(report)``."""
        low, high = self.ci
        episodes = f"{self.episodes} episode{'s' * (self.episodes != 1)}"
        parts = [f"mean return {self.mean:.4g} over {episodes}", f"95% interval {low:.4g} to {high:.4g}"]
        if self.success_rate is not None:
            parts.append(f"success rate {self.success_rate:.1%}")
        if self.normalized_score is not None:
            parts.append(f"normalized score {self.normalized_score:.1f}")
        return ", ".join(parts)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def table(self) -> Table:
        """Return the statistics as a table that ``print`` renders."""
        table = Table(title=f"Evaluation over {self.episodes} episodes", show_header=False)
        spread = f"{float(f'{self.std:.2g}'):.6g}"  # two significant digits, without an exponent
        table.add_row("mean return", f"{self.mean:.4g} ± {spread}")
        table.add_row("95% interval of the mean", "{:.4g} to {:.4g}".format(*self.ci))
        table.add_row("interquartile mean", f"{self.iqm:.4g}")
        table.add_row("mean episode length", f"{self.mean_length:.4g}")
        if self.success_rate is not None:
            table.add_row("success rate", f"{self.success_rate:.1%}")
        if self.references is not None:
            table.add_row("normalized score", f"{self.normalized_score:.1f}")
            table.caption = explain_scores(self.references)
        return table


def explain_scores(references: ReferenceScores) -> str:
    """Explain the scale of normalized scores and its source in one line."""
    low, high = references.minimum, references.maximum
    return f"normalized score: 0 is a return of {low:.6g}, 100 one of {high:.6g} ({references.source})"
