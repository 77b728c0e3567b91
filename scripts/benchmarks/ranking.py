"""Agreement of off-policy estimates with real returns: rank correlation over agents of one dataset."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from gymnasium import spaces
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.offline_setting import SHORT
from benchmarks.result_cache import run_missing
from rlxf import DecisionTransformer, estimate_return, evaluate
from rlxf.data import Trajectories, load_trajectories
from rlxf.evaluation.report import bootstrap_interval
from rlxf.off_policy_evaluation import OffPolicyEstimate
from rlxf.off_policy_evaluation.behavior import estimate_behavior

MIN_AGENTS = 3
"""Smallest number of agents with a rank correlation."""


@dataclass(frozen=True)
class Run:
    """Estimates and real returns of the agents of one training.

    Args:
        dataset: Minari id.
        seed: random seed of training and estimates.
        names: name of each agent: its updates and target return.
        returns: mean undiscounted return of each agent in the environment.
        estimates: by method, estimated discounted return of each agent, with the ends of its interval.
        used: by method, the method that was used, e.g. "fqe" for "wdr" with continuous actions.
    """

    dataset: str
    seed: int
    names: list[str]
    returns: list[float]
    estimates: dict[str, list[list[float]]]
    used: dict[str, str]

    def spearman(self, method: str) -> float | None:
        """Return Spearman's rank correlation of the estimates of a method with the real returns.

        It is None if all estimates or all returns are equal.
        """
        values = [estimate[0] for estimate in self.estimates[method]]
        if np.ptp(values) == 0 or np.ptp(self.returns) == 0:
            return None
        return float(scipy.stats.spearmanr(values, self.returns).statistic)

    def regret(self, method: str) -> float:
        """Return the loss by choosing the agent with the highest estimate, as a fraction of the range."""
        chosen = self.returns[int(np.argmax([estimate[0] for estimate in self.estimates[method]]))]
        return (max(self.returns) - chosen) / ((max(self.returns) - min(self.returns)) or 1.0)


@dataclass
class Ranking:
    """Spearman's correlation of off-policy estimates with real returns over at least ten agents per dataset.

    The agents are checkpoints of one Decision Transformer at different updates, each with several target
    returns: quantiles of the returns in the data. Estimates use the training data. The environments play only
    to measure the real returns. Datasets are read from MINARI_DATASETS_PATH; MuJoCo requires the extra
    mujoco. Completed trainings are lines of the output file and are not repeated.
    """

    datasets: tuple[str, ...] = ("rlxf/hopper/medium-v0", "rlxf/hopper/medium-replay-like-v0")
    """Minari ids."""
    setting: str = "small"
    """Sizes: small (width 64, 2 layers) or published (width 128, 3 layers)."""
    checkpoints: tuple[int, ...] = (100, 500, 2_000, 10_000)
    """Updates of the checkpoints, ascending."""
    quantiles: tuple[float, ...] = (0.1, 0.5, 1.0)
    """Target returns as quantiles of the returns in the data."""
    methods: tuple[str, ...] = ("fqe",)
    """Methods: fqe, dr, wdr."""
    discount: float = 0.99
    """Discount factor of the estimates."""
    fitted_updates: int = 20_000
    """Gradient steps of fitted Q evaluation."""
    members: int = 5
    """Q functions of an ensemble."""
    seeds: int = 1
    """Trainings per dataset."""
    episodes: int = 50
    """Episodes for the real return of each agent."""
    processes: int = 2
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-ranking.jsonl")
    """Output file with the estimates and returns of each training."""

    def __post_init__(self) -> None:
        if self.setting not in SHORT:
            raise ValueError(f"setting must be one of {', '.join(SHORT)}, got {self.setting!r}")
        if list(self.checkpoints) != sorted(set(self.checkpoints)) or self.checkpoints[:1] < (1,):
            raise ValueError(f"checkpoints must be ascending and at least 1, got {self.checkpoints}")
        if len(self.checkpoints) * len(self.quantiles) < MIN_AGENTS:
            raise ValueError(
                f"a rank correlation needs at least {MIN_AGENTS} agents, got {len(self.checkpoints)} "
                f"checkpoints with {len(self.quantiles)} target returns each"
            )

    def run(self) -> None:
        """Train, estimate and evaluate missing agents, write each result, and print the tables."""
        for dataset in self.datasets:
            load_trajectories(dataset)  # convert the data once, before processes read them
        jobs: dict[str, Callable[[], Run]] = {
            self.key(dataset, seed): partial(self.measure, dataset, seed)
            for dataset in self.datasets
            for seed in range(self.seeds)
        }
        runs = [Run(**run) for run in run_missing(jobs, self.processes, self.output).values()]
        console = Console(width=120)
        for run in runs:
            console.print(agents_table(run))
        console.print(self.table(runs), f"numbers: {self.output}")

    def key(self, dataset: str, seed: int) -> str:
        """Return the key of a training in the output file."""
        agents = f"checkpoints {self.checkpoints}, quantiles {self.quantiles}"
        fitted = f"{self.fitted_updates} updates, {self.members} members, discount {self.discount:g}"
        methods = ", ".join(self.methods)
        return (
            f"{dataset}, {self.setting}, {agents}, {methods}: {fitted}, {self.episodes} episodes, seed {seed}"
        )

    def measure(self, dataset: str, seed: int) -> Run:
        """Estimate and evaluate all agents of one training."""
        data = load_trajectories(dataset)
        targets = sorted({float(np.quantile(data.returns, quantile)) for quantile in self.quantiles})
        behavior = self.behavior(data, seed)
        run = Run(dataset, seed, [], [], {method: [] for method in self.methods}, {})
        for agent in self.trained(dataset, seed):
            env = agent.make_env(self.episodes)
            sweep = evaluate(agent, env, self.episodes, target_returns=targets)
            env.close()
            for target, report in sweep.reports.items():
                run.names.append(f"{agent.num_timesteps:,} updates, target {target:.4g}")
                run.returns.append(report.mean)
                for method in self.methods:
                    estimate = self.estimated(agent, data, method, target, seed, behavior)
                    run.estimates[method].append([estimate.value, *estimate.ci])
                    run.used[method] = estimate.method
        return run

    def trained(self, dataset: str, seed: int) -> Iterator[DecisionTransformer]:
        """Yield the agent at each checkpoint; the learning rate is constant, as the training goes on."""
        settings = SHORT[self.setting].arguments() | {"learning_rate": SHORT[self.setting].learning_rate}
        agent = DecisionTransformer(dataset, seed=seed, **settings)
        for updates in self.checkpoints:
            yield agent.learn(updates - agent.num_timesteps, reset_num_timesteps=False)

    def behavior(self, data: Trajectories, seed: int) -> NDArray[np.float64] | None:
        """Return the estimated behavior policy, which all agents share; None if no method needs it."""
        if isinstance(data.action_space, spaces.Box) or set(self.methods) == {"fqe"}:
            return None
        return estimate_behavior(data, seed)

    def estimated(
        self,
        agent: DecisionTransformer,
        data: Trajectories,
        method: Any,
        target: float,
        seed: int,
        behavior: NDArray[np.float64] | None,
    ) -> OffPolicyEstimate:
        """Estimate the return of an agent; its warnings are part of the result."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return estimate_return(
                agent,
                data,
                method,
                target_return=target,
                discount=self.discount,
                updates=self.fitted_updates,
                members=self.members,
                seed=seed,
                behavior_probabilities=behavior,
            )

    def table(self, runs: list[Run]) -> Table:
        """Return the table of rank correlations, averaged over seeds."""
        table = Table("dataset", "method", "agents", "Spearman", "95% interval over seeds", "regret")
        for dataset in self.datasets:
            group = [run for run in runs if run.dataset == dataset]
            for method in self.methods:
                each = [found for run in group if (found := run.spearman(method)) is not None]
                mean = f"{np.mean(each):.2f}" if each else "undefined"
                interval = "{:.2f} to {:.2f}".format(*bootstrap_interval(np.array(each))) if each else ""
                regret = f"{np.mean([run.regret(method) for run in group]):.0%}"
                used = group[0].used[method]
                name = method if used == method else f"{method}, as {used}"
                table.add_row(dataset, name, str(len(group[0].names)), mean, interval, regret)
        return table


def agents_table(run: Run) -> Table:
    """Return a table of the real returns and estimates of the agents of one training."""
    table = Table("agent", "real return", *run.estimates, title=f"{run.dataset}, seed {run.seed}")
    for number, (name, real) in enumerate(zip(run.names, run.returns, strict=True)):
        estimates = (each[number] for each in run.estimates.values())
        table.add_row(
            name, f"{real:.4g}", *(f"{v:.4g} ({low:.4g} to {high:.4g})" for v, low, high in estimates)
        )
    return table
