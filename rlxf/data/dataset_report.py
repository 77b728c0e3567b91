"""Report of a dataset before training: spaces, returns, ends of episodes, rewards, actions and findings."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from rich.text import Text

from rlxf.data.dataset_source import Dataset
from rlxf.data.findings import FINDINGS
from rlxf.data.loading import as_trajectories, load_trajectories
from rlxf.data.reference_scores import ReferenceScores
from rlxf.data.step_statistics import ActionStatistics, RewardStatistics, nearly_constant_features
from rlxf.data.trajectories import Trajectories, count_best
from rlxf.utils.errors import DatasetError
from rlxf.utils.tables import Table, Tabular, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles of the returns in a report."""
LEVELS = [f"{level:.0%}" for level in QUANTILES]
"""Names of the quantiles in the statistics."""
BEST_FRACTION = 0.1
"""Fraction of the episodes whose mean return is reported as that of the best ones."""
MAX_BINS, PLOTTED_BINS = 12, 50
"""Maximum numbers of bins of the histograms in the terminal and in the plot."""
BAR_WIDTH = 36
"""Length of the longest bar in the terminal, in characters."""
BEST = f"mean of best {BEST_FRACTION:.0%}"
"""Name of this mean in the statistics."""
SCORED = ("mean", BEST, "max")
"""Statistics of the returns that are also reported as normalized scores."""


@dataclass(frozen=True, eq=False, repr=False)
class DatasetReport(Tabular):
    """Statistics of one dataset or of several joined ones, see `inspect_dataset`.

    ``print(report)`` and notebooks show the table.

    Args:
        dataset_ids: Minari ids.
        observation_space: observation space.
        action_space: action space.
        env_ids: Gymnasium ids of the recorded environments; empty if no dataset names one.
        eval_env_id: Gymnasium id of the environment for evaluations; None if the datasets name none, or
            describe different ones.
        max_episode_steps: time limit of that environment; None for no limit.
        returns: float32 (E,), sum of the rewards of each episode.
        lengths: int64 (E,), number of steps of each episode.
        terminated: bool (E,), True if the episode ended in a terminal state.
        truncated: bool (E,), True if the episode was truncated.
        rewards: statistics of the rewards.
        actions: statistics of the actions.
        nearly_constant_features: features of vector observations that vary by no more than the rounding of
            float32, counted from 0.
        reference_scores: scores for the normalization of returns; None if they are not known.
        lossy_images: True if images are stored as JPEG.
    """

    dataset_ids: tuple[str, ...]
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    env_ids: tuple[str, ...]
    eval_env_id: str | None
    max_episode_steps: int | None
    returns: NDArray[np.float32]
    lengths: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    rewards: RewardStatistics
    actions: ActionStatistics
    nearly_constant_features: list[int]
    reference_scores: ReferenceScores | None
    lossy_images: bool

    @classmethod
    def of(cls, data: Trajectories) -> "DatasetReport":
        """Compute the report of trajectories; their memory-mapped arrays are read piece by piece.

        Raises:
            DatasetError: if the return of an episode is NaN or infinite.
        """
        finite = np.isfinite(data.returns)
        spec = data.eval_env_spec
        if not finite.all():
            episode = int(np.argmin(finite))
            raise DatasetError(
                f"the return of episode {episode} is {data.returns[episode]}; correct the rewards of it"
            )
        return cls(
            dataset_ids=data.dataset_ids,
            observation_space=data.observation_space,
            action_space=data.action_space,
            env_ids=data.env_ids,
            eval_env_id=None if spec is None else spec.id,
            max_episode_steps=None if spec is None else spec.max_episode_steps,
            returns=np.array(data.returns),
            lengths=data.lengths,
            terminated=np.array(data.terminated),
            truncated=np.array(data.truncated),
            rewards=RewardStatistics.of(data.rewards),
            actions=ActionStatistics.of(data.actions, data.action_space),
            nearly_constant_features=nearly_constant_features(data.observations, data.observation_std),
            reference_scores=data.reference_scores,
            lossy_images=data.lossy_images,
        )

    @property
    def episodes(self) -> int:
        """Number of episodes E."""
        return len(self.returns)

    @property
    def steps(self) -> int:
        """Number of steps of all episodes."""
        return int(self.lengths.sum())

    @property
    def ends(self) -> dict[str, float]:
        """Fractions of the episodes that are terminated, truncated, both, or neither; their sum is 1."""
        masks = {
            "terminated": self.terminated & ~self.truncated,
            "truncated": self.truncated & ~self.terminated,
            "both": self.terminated & self.truncated,
            "neither": ~self.terminated & ~self.truncated,
        }
        return {name: float(mask.mean()) for name, mask in masks.items()}

    @cached_property
    def return_statistics(self) -> dict[str, float]:
        """Mean, standard deviation, minimum, `QUANTILES`, maximum and mean of the best of the returns.

        The standard deviation is divided by E. The best episodes are the fraction `BEST_FRACTION` of them
        with the largest returns, at least one episode.
        """
        returns = np.sort(self.returns.astype(np.float64))
        quantiles = np.quantile(returns, QUANTILES).tolist()
        return {
            "mean": float(returns.mean()),
            "std": float(returns.std()),
            "min": float(returns[0]),
            **dict(zip(LEVELS, quantiles, strict=True)),
            "max": float(returns[-1]),
            BEST: float(returns[-count_best(BEST_FRACTION, self.episodes) :].mean()),
        }

    @property
    def normalized_scores(self) -> dict[str, float] | None:
        """Normalized scores of the statistics in `SCORED`; None without reference scores."""
        scores = self.reference_scores
        statistics = self.return_statistics
        if scores is None:
            return None
        return {name: float(scores.normalize(statistics[name])) for name in SCORED}

    @property
    def findings(self) -> list[str]:
        """Properties of the data that affect the training, each as a text with its consequence."""
        return [sentence for find in FINDINGS if (sentence := find(self)) is not None]

    def to_json(self) -> str:
        """Return the statistics and the findings as JSON text."""
        actions = {"minimum": self.actions.minimum, "maximum": self.actions.maximum}
        report = {
            "dataset_ids": self.dataset_ids,
            "observation_space": str(self.observation_space),
            "action_space": str(self.action_space),
            "env_ids": self.env_ids,
            "eval_env_id": self.eval_env_id,
            "max_episode_steps": self.max_episode_steps,
            "episodes": self.episodes,
            "steps": self.steps,
            "returns": self.return_statistics,
            "normalized_scores": self.normalized_scores,
            "reference_scores": self.reference_scores and asdict(self.reference_scores),
            "lengths": _extremes(self.lengths),
            "ends": self.ends,
            "rewards": asdict(self.rewards),
            "actions": actions | {"frequencies": self.actions.frequencies},
            "lossy_images": self.lossy_images,
            "findings": self.findings,
        }
        return json.dumps(report, default=np.ndarray.tolist, allow_nan=False)

    def __repr__(self) -> str:
        ids = ", ".join(self.dataset_ids)
        mean = self.return_statistics["mean"]
        counts = f"{self.episodes:,} episodes, {self.steps:,} steps"
        return printable(f"<{type(self).__name__}: {ids}, {counts}, mean return {mean:.4g}>")

    def table(self) -> Table:
        """Return the statistics as a table that ``print`` renders."""
        title = Text(printable(", ".join(self.dataset_ids)), "table.title")
        table = Table(title=title, show_header=False)
        for name, value in self._rows().items():
            table.add_row(name, Text(printable(value)))  # a string of a file could contain markup of rich
        scores = self.reference_scores
        if scores is not None:
            scale = f"0 for a return of {scores.minimum:g}, 100 for a return of {scores.maximum:g}"
            table.caption = Text(printable(f"normalized score: {scale}; {scores.source}"), "table.caption")
        return table

    def _rows(self) -> dict[str, str]:
        ends = self.ends.items()
        returns = self.return_statistics
        return {
            **self._environments(),
            "observation space": _one_line(self.observation_space) + " (JPEG)" * self.lossy_images,
            "action space": _one_line(self.action_space),
            "episodes, steps": f"{self.episodes:,}, {self.steps:,}",
            "episode lengths": _listing(_extremes(self.lengths)),
            "episode ends": ", ".join(f"{100 * fraction:.3g}% {end}" for end, fraction in ends if fraction),
            "rewards": str(self.rewards),
            "actions": str(self.actions),
            "returns": _listing({name: value for name, value in returns.items() if name not in LEVELS}),
            "quantiles of returns": _listing({name: returns[name] for name in LEVELS}),
            "normalized scores": _listing(self.normalized_scores or {}) or "unknown",
        }

    def _environments(self) -> dict[str, str]:
        """Return the rows of the environments: a single one if evaluations use the recorded environment."""
        limit = "" if self.max_episode_steps is None else f", at most {self.max_episode_steps:,} steps"
        recorded, used = ", ".join(self.env_ids) or "unknown", self.eval_env_id or "unknown"
        if recorded == used:
            return {"environment": recorded + limit}
        return {"environment": recorded, "environment for evaluations": used + limit}

    def histogram(self, symbol: str = "█") -> Table:
        """Return a histogram of the returns as a table with a row for each bin.

        Args:
            symbol: character of the bars.
        """
        counts, edges = np.histogram(self.returns, bins=self._bins(MAX_BINS))
        table = Table("return", "episodes", "", title="Distribution of returns", title_justify="left")
        table.box = None
        table.pad_edge = False
        for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
            values = f"{low:,.4g} to {high:,.4g}" if len(counts) > 1 else f"{self.returns[0]:,.4g}"
            bar = symbol * int(np.ceil(BAR_WIDTH * count / counts.max()))
            table.add_row(values, f"{count:,}", bar)
        for column in table.columns[:2]:
            column.justify = "right"
            column.no_wrap = True
        return table

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write `figure` to a new PNG file, replacing an existing one.

        Raises:
            OSError: if the file cannot be written.
        """
        Path(path).unlink(missing_ok=True)  # savefig would follow a link
        self.figure().savefig(path, format="png")

    def figure(self) -> "Figure":
        """Plot the distribution of returns as a matplotlib figure of 840 by 540 pixels.

        Lines mark the mean and the mean of the best 10%. The upper axis has normalized scores, if reference
        scores are known.
        """
        from matplotlib.figure import Figure  # the import takes half a second

        figure = Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
        axes = figure.subplots()
        axes.hist(self.returns, bins=self._bins(PLOTTED_BINS).tolist(), color="tab:blue", alpha=0.7)
        for name, color in (("mean", "black"), (BEST, "tab:orange")):
            value = self.return_statistics[name]
            axes.axvline(value, color=color, linestyle="--", label=f"{name}: {value:.4g}")
        axes.set(xlabel="return of an episode", ylabel="episodes")
        axes.set_title(printable(", ".join(self.dataset_ids)), parse_math=False)
        if self.reference_scores is not None:
            low, high = self.reference_scores.minimum, self.reference_scores.maximum
            score = (lambda x: 100 * (x - low) / (high - low), lambda x: low + x * (high - low) / 100)
            axes.secondary_xaxis("top", functions=score).set_xlabel("normalized score")
        axes.legend()
        return figure

    def _bins(self, most: int) -> NDArray[np.float64]:
        """Return the edges of at most ``most`` bins of equal width; a single bin if all returns are equal."""
        low, high = float(self.returns.min()), float(self.returns.max())
        if low == high:
            margin = max(0.5, abs(low) / 100)
            return np.array([low - margin, high + margin])
        return np.linspace(low, high, min(most, len(np.unique(self.returns))) + 1)


def _one_line(space: spaces.Space[Any]) -> str:
    return " ".join(str(space).split())  # NumPy aligns bounds with spaces and line breaks


def _extremes(values: NDArray[Any]) -> dict[str, float]:
    """Return mean, minimum, median and maximum of values (n,)."""
    return {
        "mean": float(values.mean()),
        "min": float(values.min()),
        "median": float(np.median(values)),
        "max": float(values.max()),
    }


def _listing(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.4g}" for name, value in values.items())


def inspect_dataset(
    dataset: Dataset | Sequence[Dataset] | Trajectories,
    *,
    download: bool = False,
    progress_bar: bool = False,
) -> DatasetReport:
    """Compute statistics of a dataset, and find properties that affect the training.

    The dataset is converted to memory-mapped arrays, as for training, and is not read into memory. Code that
    the dataset names is not run. Values with which agents cannot be trained, such as NaN or actions outside
    of their space, are errors.

    Args:
        dataset: as in `load_trajectories`, or trajectories.
        download: True to download a dataset that is missing or incomplete on this machine.
        progress_bar: show a progress bar while converting.

    Raises:
        DatasetError, TypeError, ConnectionError, OSError: as `load_trajectories`.
            Trajectories are validated as by `as_trajectories`.

    Warns:
        UserWarning: as `load_trajectories`.
    """
    if isinstance(dataset, Trajectories):
        return DatasetReport.of(as_trajectories(dataset))
    return DatasetReport.of(load_trajectories(dataset, download=download, progress_bar=progress_bar))
