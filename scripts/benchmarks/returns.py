"""Returns of offline methods on the same datasets: behavior cloning, Decision Transformers, HF's model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks import hugging_face
from benchmarks.offline_criteria import CRITERIA, criteria, worst_seed
from benchmarks.offline_methods import METHODS, PRESETS, Preset, excluded
from benchmarks.offline_runs import DATA, Job, Run, measure, measure_data
from benchmarks.result_cache import check_names, run_missing
from rlxf.evaluation.intervals import stratified_interquartile_mean
from rlxf.utils.checks import check_choice

MUJOCO = (
    "rlxf/hopper/medium-v0",
    "rlxf/hopper/medium-replay-like-v0",
    "rlxf/hopper/medium-expert-v0",
    "rlxf/halfcheetah/medium-v0",
)
THEIRS = "hf"
"""Name of the method that needs the virtual environment of HF's model."""
COLUMNS = (
    *("method", "seeds", "IQM (95% interval)", "mean", "mean return", "worst seed", "ms per update", "MB"),
)

AGENT_COLUMNS = ("dataset", "method", "seed", "mean", "validation loss")


@dataclass
class Returns:
    """Returns of offline methods on datasets, with intervals over seeds and episodes, and their cost.

    Methods: bc (behavior cloning), bc-best (of the best 10% of the episodes), bc-weighted (of steps that are
    drawn by the return of their episode, ReturnWeighted(0.1)), bc-high (of episodes with returns in the upper
    quarter of their range, HighReturns(0.25)), rvs (return-conditioned perceptron), dt
    (Decision Transformer), dt-weighted (sampled like bc-weighted), dt-q (with QRegularized), dt-max,
    dt-elastic, dt-sampled (with MaxReturn, ElasticHistory or SampledReturn in place of a target return),
    dt-q-max (QRegularized and MaxReturn), dt-q-value (QRegularized and HighestValueReturn), hf (HF's Decision
    Transformer). The target of rvs, dt, dt-weighted, dt-q and hf is the highest return of the data. Methods
    that the data do not allow are left out with the reason.

    Each result is that of the last checkpoint. All datasets have the same sizes and learning rates. Policies
    are deterministic, except that dt-sampled samples, as in its source. Scores are normalized if the data
    have reference scores, and are returns otherwise; the column "mean return" is never normalized. The
    interquartile mean is over all episodes of all seeds; its interval resamples seeds and episodes. The worst
    seed is that with the lowest mean. The last table shows which methods reach at least the score of cloning
    the best 10% on each dataset, 10 points more than dt on average, and with each seed at least the mean of
    the data. Times are CPU times with one thread; memory is the peak of a new process minus its memory
    before, when all modules are loaded.

    Completed runs are lines of the output file and are not repeated. Datasets are read from
    MINARI_DATASETS_PATH; MuJoCo requires the extra mujoco.
    """

    datasets: tuple[str, ...] = MUJOCO
    """Minari ids."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Names of the methods."""
    preset: str = "default"
    """Sizes of all agents. Both presets have transformers of width 64 with 2 layers.
    default: context 20, batch 64, width 1,024 of rvs, 10,000 updates; 7.5 hours of CPU time per dataset.
    reduced: context 10, batch 32, width 256 of rvs, 7,500 updates; about 2 hours per dataset."""
    updates: int | None = None
    """Updates of each agent; None for those of the preset."""
    width: int | None = None
    """Width of the transformers; None for that of the preset."""
    layers: int | None = None
    """Layers of the transformers; None for those of the preset."""
    context: int | None = None
    """Steps in the context of the transformers; None for those of the preset."""
    batch_size: int | None = None
    """Windows in an update of the transformers; None for those of the preset."""
    weight_averaging: float | None = None
    """Decay of the moving average of weights by which all agents but hf act; None for none."""
    dropout: float | None = None
    """Dropout of the transformers; None for 0.1."""
    state_loss_weight: float = 0.0
    """Weight of the auxiliary loss of the transformers but hf: the prediction of the next observation."""
    validation_fraction: float | None = None
    """Share of the episodes that all agents but hf hold out; None for none. A table then shows the loss of
    each agent on them next to its score, for the diagnosis of seeds that fail."""
    seeds: int = 5
    """Agents of each method on each dataset."""
    episodes: int = 50
    """Evaluation episodes of each agent."""
    processes: int = 2
    """Parallel processes, with one thread each."""
    venv: Path = hugging_face.CACHE
    """Folder of the virtual environment of HF's model."""
    output: Path = Path("runs/bench-returns.jsonl")
    """Output file with a line for each agent and for each dataset."""

    def __post_init__(self) -> None:
        check_names(methods=(self.methods, METHODS))
        check_choice("preset", self.preset, tuple(PRESETS))
        for name in ("updates", "width", "layers", "context", "batch_size", "seeds", "episodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def sizes(self) -> Preset:
        """Preset with the sizes that were given."""
        preset = PRESETS[self.preset]
        given: dict[str, Any] = {
            "width": self.width,
            "layers": self.layers,
            "context_length": self.context,
            "batch_size": self.batch_size,
            "dropout": self.dropout,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        setting = replace(preset.transformer, **changes)
        return replace(
            preset,
            updates=self.updates or preset.updates,
            transformer=setting,
            weight_averaging=self.weight_averaging,
            validation_fraction=self.validation_fraction,
            state_loss_weight=self.state_loss_weight,
        )

    def run(self) -> None:
        """Train and evaluate missing agents, and print the tables."""
        console = Console(width=150)
        methods = {dataset: self.allowed(dataset, console) for dataset in self.datasets}
        if any(THEIRS in each for each in methods.values()):
            hugging_face.install(self.venv)
        jobs: dict[str, Callable[[], Run]] = {
            f"{dataset}, {DATA}": partial(measure_data, dataset) for dataset in self.datasets
        }
        jobs |= {
            job.key: partial(measure, job, self.venv)
            for seed in range(self.seeds)
            for dataset, names in methods.items()
            for job in (Job(dataset, name, self.sizes, seed, self.episodes) for name in names)
        }
        runs = [Run(**run) for run in run_missing(jobs, self.processes, self.output).values()]
        for dataset in self.datasets:
            console.print(as_table(dataset, rows([run for run in runs if run.dataset == dataset], [dataset])))
        if len(self.datasets) > 1:
            console.print(as_table("all datasets", rows(runs, self.datasets)))
            groups = {METHODS[name].title: [run for run in runs if run.method == name] for name in METHODS}
            columns = ("method", *self.datasets, "all", "worst seed minus the data")
            of_data = [run for run in runs if run.method == DATA]
            console.print(as_table("IQM, side by side", side_by_side(groups, of_data), columns))
        console.print(as_table("criteria", criteria(runs, self.datasets), CRITERIA))
        if self.validation_fraction is not None:
            console.print(as_table("agents", agent_rows(runs), AGENT_COLUMNS))
        console.print(f"numbers: {self.output}")

    def allowed(self, dataset: str, console: Console) -> list[str]:
        """Return the methods that the data allow, and print the reason for each of the others."""
        reasons = {name: excluded(dataset, name) for name in self.methods}
        for name, reason in reasons.items():
            if reason is not None:
                console.print(f"{dataset}: {name} is left out: {reason}")
        return [name for name, reason in reasons.items() if reason is None]


def as_table(title: str, cells: Sequence[Sequence[str]], columns: Sequence[str] = COLUMNS) -> Table:
    """Return a printable table of rows, by default those of `rows`."""
    table = Table(*columns, title=title)
    for row in cells:
        table.add_row(*row)
    return table


def rows(runs: Sequence[Run], datasets: Sequence[str]) -> list[list[str]]:
    """Return the rows of the data and of each method that has runs on all datasets, see `COLUMNS`.

    Args:
        runs: runs of methods with one preset, and of the data.
        datasets: Minari ids; with several, numbers are over all of them.
    """
    table = []
    for method in (DATA, *METHODS):
        groups = [[r for r in runs if (r.method, r.dataset) == (method, dataset)] for dataset in datasets]
        if all(groups):
            strata = [np.stack([run.scores for run in group]) for group in groups]
            cost = ["", "", ""] if method == DATA else cost_cells(strata, [run for g in groups for run in g])
            table.append([*score_cells(method, strata), mean_return(groups), *cost])
    return table


def side_by_side(groups: Mapping[str, Sequence[Run]], of_data: Sequence[Run]) -> list[list[str]]:
    """Return a row for each group of runs that has all datasets: interquartile means, and the worst seed.

    The last but one column is over the episodes of all datasets. The last column is the mean score of a seed
    minus that of the data, for the seed and the dataset with the lowest difference.

    Args:
        groups: runs of one method with one setting, by title.
        of_data: one run for each dataset, with the episodes of the data.
    """
    table = []
    for title, runs in groups.items():
        by_dataset = [[run for run in runs if run.dataset == data.dataset] for data in of_data]
        if all(by_dataset):
            strata = [np.stack([run.scores for run in same]) for same in by_dataset]
            means = [
                f"{stratified_interquartile_mean(each):.1f}" for each in (*([s] for s in strata), strata)
            ]
            worst = worst_seed(by_dataset, [[data] for data in of_data])
            table.append([title, *means, f"{worst:.1f}"])
    return table


def agent_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return a row for each agent with a validation loss, see `AGENT_COLUMNS`."""
    measured = [run for run in runs if run.validation_loss is not None]
    return [
        [
            run.dataset,
            METHODS[run.method].title,
            str(run.seed),
            f"{run.scores.mean():.1f}",
            f"{run.validation_loss:.4g}",
        ]
        for run in sorted(measured, key=lambda run: (run.dataset, run.method, run.seed))
    ]


def score_cells(method: str, strata: Sequence[NDArray[np.float64]]) -> list[str]:
    """Return name, number of seeds, interquartile mean and mean, for scores (seeds, episodes) by dataset."""
    return [
        "the data" if method == DATA else METHODS[method].title,
        "" if method == DATA else str(min(map(len, strata))),
        f"{stratified_interquartile_mean(strata):.1f}",
        f"{np.mean([table.mean() for table in strata]):.1f}",
    ]


def mean_return(groups: Sequence[Sequence[Run]]) -> str:
    """Return the mean return on a dataset, in units of its rewards; empty for several datasets."""
    return f"{np.mean([run.returns for run in groups[0]]):.1f}" if len(groups) == 1 else ""


def cost_cells(strata: Sequence[NDArray[np.float64]], runs: Sequence[Run]) -> list[str]:
    """Return the mean of the worst seed, the milliseconds of an update and the memory of a method."""
    return [
        f"{min(table.mean(axis=1).min() for table in strata):.1f}",
        f"{median(run.milliseconds for run in runs):.1f}",
        f"{max(run.megabytes for run in runs):.0f}",
    ]
