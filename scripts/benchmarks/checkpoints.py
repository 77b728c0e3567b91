"""Returns of neighboring checkpoints of Decision Transformers: newest weights, averages, held-out loss."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from stable_baselines3.common.callbacks import BaseCallback
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.offline_setting import SHORT
from benchmarks.result_cache import check_names, run_missing
from rlxf import DecisionTransformer, evaluate
from rlxf.data import HighReturns, Sampling, load_trajectories
from rlxf.data.sampling import UNIFORM_STEPS
from rlxf.evaluation.intervals import rank_correlation
from rlxf.utils.checks import check_int

NEWEST, AVERAGE = "newest", "average"
"""Names of the weights that are evaluated."""


@dataclass(frozen=True)
class Variant:
    """Settings in which trainings differ.

    Args:
        dropout: dropout of the transformer.
        sampling: probabilities of the windows.
    """

    dropout: float = 0.1
    sampling: Sampling = UNIFORM_STEPS

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `DecisionTransformer`."""
        return replace(SHORT["small"], dropout=self.dropout).arguments() | {"sampling": self.sampling}


VARIANTS = {
    "dropout 0.1": Variant(),
    "no dropout": Variant(dropout=0.0),
    "high returns": Variant(sampling=HighReturns(0.25)),
}
COLUMNS = (
    *("variant", "weights", "mean", "mean length", "failed", "change to the next"),
    *("lowest of each seed", "last of each seed", "Spearman with lower loss"),
)


@dataclass(frozen=True)
class Checkpoint:
    """Result of one state of the weights.

    Args:
        update: number of updates.
        weights: `NEWEST` or `AVERAGE`.
        loss: mean loss on the held-out episodes.
        returns: return of each evaluation episode.
        lengths: length of each evaluation episode, in steps.
    """

    update: int
    weights: str
    loss: float
    returns: list[float]
    lengths: list[int]


@dataclass(frozen=True)
class Run:
    """Checkpoints of one training.

    Args:
        variant: a name in `VARIANTS`.
        seed: random seed of the training.
        checkpoints: results in the order of the updates.
    """

    variant: str
    seed: int
    checkpoints: list[Checkpoint]

    def returns(self, weights: str) -> NDArray[np.float64]:
        """Return the mean return of each checkpoint, (number of checkpoints,)."""
        return np.array([np.mean(each.returns) for each in self.checkpoints if each.weights == weights])

    def mean_length(self, weights: str) -> float:
        """Return the mean length of the episodes of all checkpoints, in steps."""
        return float(np.mean([each.lengths for each in self.checkpoints if each.weights == weights]))

    def losses(self, weights: str) -> NDArray[np.float64]:
        """Return the loss of each checkpoint on the held-out episodes, (number of checkpoints,)."""
        return np.array([each.loss for each in self.checkpoints if each.weights == weights])


class CheckpointEvaluation(BaseCallback):
    """Evaluate the newest weights and their moving average after given numbers of updates.

    The average starts with the weights after the first update, without bias correction. After 5,000 updates
    at a decay of 0.999, it differs by less than 1% of these weights from that of ``weight_averaging``.

    Args:
        average_decay: decay of the moving average.
        updates: numbers of updates.
        episodes: episodes of an evaluation, which are always the same.
        target: target return.

    Attributes:
        checkpoints: the results.
    """

    model: DecisionTransformer

    def __init__(self, average_decay: float, updates: Collection[int], episodes: int, target: float):
        super().__init__()
        self.update_average = get_ema_multi_avg_fn(average_decay)
        self.updates, self.episodes, self.target = updates, episodes, target
        self.checkpoints: list[Checkpoint] = []

    def _on_training_start(self) -> None:
        self.average = AveragedModel(self.model.policy, multi_avg_fn=self.update_average)
        self.env = self.model.make_env(self.episodes)

    def _on_step(self) -> bool:
        self.average.update_parameters(self.model.policy)
        if self.num_timesteps in self.updates:
            self.checkpoints.append(self._measure(NEWEST))
            with acting_with(self.model, self.average.module):
                self.checkpoints.append(self._measure(AVERAGE))
        return True

    def _measure(self, weights: str) -> Checkpoint:
        report: Any = evaluate(self.model, self.env, self.episodes, target_returns=[self.target])
        returns, lengths = (np.asarray(x).tolist() for x in (report.first.returns, report.first.lengths))
        loss = self.model.validation_losses()["loss"]
        return Checkpoint(self.num_timesteps, weights, loss, returns, lengths)

    def _on_training_end(self) -> None:
        self.env.close()


@contextmanager
def acting_with(agent: DecisionTransformer, other: Any) -> Iterator[None]:
    """Give an agent the weights of another model for the duration of the context."""
    own = deepcopy(agent.policy.state_dict())
    agent.policy.load_state_dict(other.state_dict())
    try:
        yield
    finally:
        agent.policy.load_state_dict(own)


@dataclass
class Checkpoints:
    """Returns of the checkpoints of single trainings, to tell bad trainings from bad checkpoints.

    In the second half of each training, the newest weights and their moving average are evaluated in the same
    episodes, for the highest return of the data as target, and their loss on held-out episodes is measured.
    The average does not influence the training. A checkpoint has failed if its mean return is below half of
    that of the best checkpoint of all variants.

    Trainings are those of `bench.py targets`: width 64, 2 layers, a context of 20 steps, batches of 64
    windows, and a learning rate that decays from 1e-3 to 1e-4. The variants are the published one, which has
    a dropout of 0.1 and equally likely windows, one without dropout, and one whose windows are from episodes
    with returns in the upper quarter of their range (`HighReturns`). Completed runs are lines of the output
    file and are not repeated. The dataset is read from MINARI_DATASETS_PATH; Hopper requires the extra
    mujoco.
    """

    dataset: str = "rlxf/hopper/medium-replay-like-v0"
    """Minari id."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    """Names of the variants."""
    seeds: int = 5
    """Trainings of each variant."""
    updates: int = 10_000
    """Updates of each training."""
    evaluations: int = 6
    """Evenly spaced evaluations in the second half of the updates; the last one is after all of them."""
    average_decay: float = 0.999
    """Decay of the moving average of the weights."""
    validation_fraction: float = 0.1
    """Share of the episodes that are held out."""
    episodes: int = 20
    """Episodes of an evaluation."""
    processes: int = 2
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-checkpoints.jsonl")
    """Output file with a line for each training."""

    def __post_init__(self) -> None:
        check_names(variants=(self.variants, VARIANTS))
        for name in ("updates", "evaluations", "seeds"):
            check_int(name, getattr(self, name))

    def run(self) -> None:
        """Make missing trainings, and print the table."""
        load_trajectories(self.dataset)  # convert the data once, before processes read them
        jobs: dict[str, Callable[[], Run]] = {
            self.key(variant, seed): partial(self.train, variant, seed)
            for variant, seed in product(self.variants, range(self.seeds))
        }
        runs = [as_run(run) for run in run_missing(jobs, self.processes, self.output).values()]
        table = Table(*COLUMNS, title=f"{self.dataset}: mean returns of checkpoints")
        for row in rows(runs):
            table.add_row(*row)
        console = Console(width=150)
        console.print(table)
        for variant, returns in lowest_losses(runs).items():
            chosen = ", ".join(f"{each:.0f}" for each in returns)
            console.print(f"{variant}, checkpoint with the lowest held-out loss of each seed: {chosen}")
        console.print(f"runs: {self.output}")

    def key(self, variant: str, seed: int) -> str:
        """Return the key of a training in the output file."""
        return (
            f"{self.dataset}, {variant}, {self.updates} updates, {self.evaluations} evaluations of "
            f"{self.episodes} episodes, average {self.average_decay:g}, held out "
            f"{self.validation_fraction:g}, seed {seed}"
        )

    def train(self, variant: str, seed: int) -> Run:
        """Train one agent and evaluate its checkpoints."""
        data, options = load_trajectories(self.dataset), VARIANTS[variant].arguments()
        options["validation_fraction"] = self.validation_fraction
        agent = DecisionTransformer(data, seed=seed, device="cpu", **options)
        updates = np.linspace(self.updates, self.updates // 2, self.evaluations).astype(int).tolist()
        target = float(data.returns.max())
        evaluation = CheckpointEvaluation(self.average_decay, updates, self.episodes, target)
        agent.learn(self.updates, evaluation)
        return Run(variant, seed, evaluation.checkpoints)


def as_run(data: dict[str, Any]) -> Run:
    """Build a run from the data of its line in the output file."""
    return Run(data["variant"], data["seed"], [Checkpoint(**each) for each in data["checkpoints"]])


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return two rows for each variant, see `COLUMNS`, with numbers over the checkpoints of all trainings."""
    table, limit = [], max(run.returns(weights).max() for run in runs for weights in (NEWEST, AVERAGE)) / 2
    for variant in dict.fromkeys(run.variant for run in runs):
        chosen = [run for run in runs if run.variant == variant]
        table += [[variant, *cells(chosen, weights, limit)] for weights in (NEWEST, AVERAGE)]
    return table


def cells(runs: Sequence[Run], weights: str, limit: float) -> list[str]:
    """Return the numbers of one kind of weights; failed checkpoints have mean returns below a limit."""
    returns = np.stack([run.returns(weights) for run in runs])
    failed = returns < limit
    correlations = [rank_correlation(-run.losses(weights), run.returns(weights)) for run in runs]
    return [
        weights,
        f"{returns.mean():.0f}",
        f"{np.mean([run.mean_length(weights) for run in runs]):.0f}",
        f"{failed.sum()} of {failed.size}",
        f"{np.abs(np.diff(returns, axis=1)).mean():.0f}",
        ", ".join(f"{each:.0f}" for each in returns.min(axis=1)),
        ", ".join(f"{each:.0f}" for each in returns[:, -1]),
        ", ".join("-" if each is None else f"{each:.1f}" for each in correlations),
    ]


def lowest_losses(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Return, by variant, the return of the checkpoint with the lowest held-out loss of each training."""
    found: dict[str, list[float]] = {}
    for run in runs:
        best = min(run.checkpoints, key=lambda checkpoint: checkpoint.loss)
        found.setdefault(run.variant, []).append(float(np.mean(best.returns)))
    return found
