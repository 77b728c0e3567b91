"""Agreement of off-policy estimates with real returns: rank correlation over agents of one dataset."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.offline_methods import METHODS, PRESETS, excluded
from benchmarks.offline_runs import evaluated
from benchmarks.result_cache import check_names, run_missing
from rlxf import estimate_return
from rlxf.data import Trajectories, load_trajectories
from rlxf.evaluation.intervals import rank_correlation_interval
from rlxf.off_policy_evaluation import OffPolicyEstimate
from rlxf.off_policy_evaluation.behavior import estimate_behavior
from rlxf.utils.checks import check_choice

CHECKPOINTS = {
    "bc": (0.1, 1.0),
    "bc-best": (0.1, 1.0),
    "rvs": (1.0,),
    "dt": (0.05, 0.25, 1.0),
    "dt-q-max": (1.0,),
}
"""Name of a method in `METHODS` -> amounts of training of its agents, as fractions of the updates."""
MIN_AGENTS = 10
"""Smallest number of agents of a ranking; intervals of the correlation are very wide with fewer."""
DIRECT = "fqe"
"""Estimator that is defined for all actions; the others need discrete ones."""
ESTIMATORS = (DIRECT, "dr", "wdr")
COLUMNS = ("dataset", "estimator", "agents", "Spearman (95% interval)", "regret")


@dataclass(frozen=True)
class Effort:
    """Cost of the estimates and of the real returns.

    Args:
        fitted_updates: gradient steps of fitted Q evaluation.
        members: Q functions of an ensemble.
        episodes: episodes for the real return of each agent.
    """

    fitted_updates: int
    members: int
    episodes: int


EFFORTS = {"default": Effort(20_000, 5, 50), "reduced": Effort(10_000, 3, 20)}
"""Effort of each preset of `PRESETS`."""


@dataclass(frozen=True)
class Run:
    """Estimates and real returns of the agents of one training, which differ in their target return.

    Args:
        dataset: Minari id.
        seed: random seed of training and estimates.
        names: name of each agent.
        returns: mean undiscounted return of each agent in the environment.
        estimates: by estimator, estimated discounted return of each agent, with the ends of its interval.
    """

    dataset: str
    seed: int
    names: list[str]
    returns: list[float]
    estimates: dict[str, list[list[float]]]

    def values(self, estimator: str) -> list[float]:
        """Return the estimate of each agent."""
        return [value for value, _, _ in self.estimates[estimator]]


@dataclass
class Ranking:
    """Spearman's correlation of off-policy estimates with real returns over at least ten agents per dataset.

    By default there are 17 agents per dataset and seed: behavior cloning of all and of the best 10% of the
    episodes after two amounts of training, a Decision Transformer with a critic and predicted returns, and a
    return-conditioned perceptron and a Decision Transformer, the latter after three amounts of training, each
    with three target returns: quantiles of the returns in the data. Estimates use the training data. The
    environments play only to measure the real returns. Doubly robust estimates need discrete actions and are
    left out for continuous ones.

    Regret is the loss by choosing the agent with the highest estimate, as a fraction of the range of real
    returns. The interval of the correlation resamples agents. Datasets are read from MINARI_DATASETS_PATH;
    MuJoCo requires the extra mujoco. Completed trainings are lines of the output file and are not repeated.
    """

    datasets: tuple[str, ...] = ("rlxf/hopper/medium-v0", "rlxf/hopper/medium-replay-like-v0")
    """Minari ids."""
    agents: tuple[str, ...] = tuple(CHECKPOINTS)
    """Methods of the agents: bc, bc-best, rvs, dt, dt-q-max, as in the benchmark "returns"."""
    preset: str = "default"
    """Sizes of the agents as in the benchmark "returns", and effort of the estimates. default: 20,000 updates
    of 5 Q functions, 50 episodes. reduced: 10,000 updates of 3 Q functions, 20 episodes."""
    updates: int | None = None
    """Updates of the agents with the full amount of training; None for those of the preset."""
    fitted_updates: int | None = None
    """Gradient steps of fitted Q evaluation; None for those of the preset."""
    quantiles: tuple[float, ...] = (0.1, 0.5, 1.0)
    """Target returns as quantiles of the returns in the data."""
    estimators: tuple[str, ...] = (DIRECT, "wdr")
    """Estimators: fqe, dr, wdr."""
    discount: float = 0.99
    """Discount factor of the estimates."""
    seeds: int = 1
    """Trainings of each agent."""
    processes: int = 2
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-ranking.jsonl")
    """Output file with a line for each training: estimates and real returns of its agents."""

    def __post_init__(self) -> None:
        check_names(agents=(self.agents, CHECKPOINTS), estimators=(self.estimators, ESTIMATORS))
        check_choice("preset", self.preset, tuple(PRESETS))
        targets = {"rvs": len(self.quantiles), "dt": len(self.quantiles)}
        count = sum(targets.get(name, 1) * len(CHECKPOINTS[name]) for name in self.agents)
        if count < MIN_AGENTS:
            raise ValueError(
                f"a ranking needs at least {MIN_AGENTS} agents, got {count}: agents {self.agents} "
                f"with {len(self.quantiles)} target returns"
            )

    @property
    def effort(self) -> Effort:
        """Effort of the preset."""
        return EFFORTS[self.preset]

    def run(self) -> None:
        """Train, estimate and evaluate missing agents, write each result, and print the tables."""
        console = Console(width=120)
        jobs: dict[str, Callable[[], Run]] = {
            self.key(dataset, name, amount, seed): partial(self.measure, dataset, name, amount, seed)
            for seed in range(self.seeds)
            for dataset in self.datasets
            for name in self.agents
            if excluded(dataset, name) is None  # this also converts the data once, before processes read them
            for amount in CHECKPOINTS[name]
        }
        runs = [Run(**run) for run in run_missing(jobs, self.processes, self.output).values()]
        for dataset in self.datasets:
            for seed in range(self.seeds):
                console.print(agents_table([r for r in runs if (r.dataset, r.seed) == (dataset, seed)]))
        table = Table(*COLUMNS)
        for row in rows(runs):
            table.add_row(*row)
        console.print(table, f"numbers: {self.output}")

    def updates_of(self, amount: float) -> int:
        """Return the updates of an agent with a fraction of the training."""
        return max(1, round(amount * (self.updates or PRESETS[self.preset].updates)))

    def key(self, dataset: str, name: str, amount: float, seed: int) -> str:
        """Return the key of a training in the output file."""
        sizes = METHODS[name].sizes(PRESETS[self.preset])
        agent = f"{name}, {self.updates_of(amount)} of {sizes}, quantiles {self.quantiles}"
        fitted = f"{self.fitted_updates or self.effort.fitted_updates} updates, {self.effort.members} members"
        estimators = ", ".join(self.estimators)
        return (
            f"{dataset}, {agent}, {estimators}: {fitted}, discount {self.discount:g}, "
            f"{self.effort.episodes} episodes, seed {seed}"
        )

    def measure(self, dataset: str, name: str, amount: float, seed: int) -> Run:
        """Train an agent, and estimate and evaluate it for each target return."""
        data, train = load_trajectories(dataset), METHODS[name].train
        assert train is not None
        agent = train(data, PRESETS[self.preset], seed).learn(self.updates_of(amount))
        estimators = self.defined(data)
        behavior = None if estimators == [DIRECT] else estimate_behavior(data, seed)
        run = Run(dataset, seed, [], [], {estimator: [] for estimator in estimators})
        for target in self.targets(data) if agent.return_conditioned else [None]:
            run.names.append(described(name, agent.num_timesteps, target))
            run.returns.append(float(np.mean(evaluated(agent, self.effort.episodes, target))))
            for estimator in estimators:
                estimate = self.estimated(agent, data, estimator, target, seed, behavior)
                run.estimates[estimator].append([estimate.value, *estimate.ci])
        return run

    def targets(self, data: Trajectories) -> list[float]:
        """Return the target returns, ascending and distinct."""
        return sorted({float(np.quantile(data.returns, quantile)) for quantile in self.quantiles})

    def defined(self, data: Trajectories) -> list[str]:
        """Return the estimators that are defined for the actions of the data."""
        if isinstance(data.action_space, spaces.Box):
            return [DIRECT]
        return list(self.estimators)

    def estimated(
        self,
        agent: Any,
        data: Trajectories,
        estimator: Any,
        target: float | None,
        seed: int,
        behavior: NDArray[np.float64] | None,
    ) -> OffPolicyEstimate:
        """Estimate the return of an agent; its warnings are part of the result."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return estimate_return(
                agent,
                data,
                estimator,
                target_return=target,
                discount=self.discount,
                updates=self.fitted_updates or self.effort.fitted_updates,
                members=self.effort.members,
                seed=seed,
                behavior_probabilities=behavior,
            )


def described(name: str, updates: int, target: float | None) -> str:
    """Return the name of an agent in tables."""
    trained = f"{METHODS[name].title.removesuffix(', highest target')}, {updates:,} updates"
    return trained if target is None else f"{trained}, target {target:.4g}"


def agents_table(runs: Sequence[Run]) -> Table:
    """Return a table of the real returns and estimates of the agents of one dataset and seed."""
    table = Table("agent", "real return", *runs[0].estimates, title=f"{runs[0].dataset}, seed {runs[0].seed}")
    for run in runs:
        estimates = zip(*run.estimates.values(), strict=True)
        for name, real, each in zip(run.names, run.returns, estimates, strict=True):
            table.add_row(
                name, f"{real:.4g}", *(f"{v:.4g} ({low:.4g} to {high:.4g})" for v, low, high in each)
            )
    return table


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return a row for each dataset and estimator, averaged over seeds, see `COLUMNS`."""
    table = []
    for dataset in dict.fromkeys(run.dataset for run in runs):
        own = [run for run in runs if run.dataset == dataset]
        for estimator in own[0].estimates:
            groups = [pairs(own, estimator, seed) for seed in sorted({run.seed for run in own})]
            correlation = rank_correlation_interval(groups)
            interval = "undefined" if correlation is None else f"{correlation:.2f}"
            loss = np.mean([regret(*group) for group in groups])
            table.append([dataset, estimator, str(len(groups[0][0])), interval, f"{loss:.0%}"])
    return table


def pairs(runs: Sequence[Run], estimator: str, seed: int) -> tuple[list[float], list[float]]:
    """Return the estimates and the real returns of all agents of one seed."""
    own = [run for run in runs if run.seed == seed]
    estimates = [value for run in own for value in run.values(estimator)]
    return estimates, [real for run in own for real in run.returns]


def regret(estimates: Sequence[float], returns: Sequence[float]) -> float:
    """Return the loss by choosing the agent with the highest estimate, as a fraction of the range."""
    chosen = returns[int(np.argmax(estimates))]
    return (max(returns) - chosen) / ((max(returns) - min(returns)) or 1.0)
