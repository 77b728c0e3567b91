"""Gain and cost of kNN retrieval from better trajectories for a Decision Transformer."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.depth import as_report
from benchmarks.offline_setting import SHORT
from benchmarks.result_cache import run_missing
from rlxf import DecisionTransformer, evaluate
from rlxf.agents.common.retrieval import ActionDatastore
from rlxf.agents.decision_transformer.retrieval import encode_dataset
from rlxf.attention import KNNLM, SPALM
from rlxf.attention.heads.base import Datastore, OutputHead
from rlxf.data import load_trajectories
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.evaluation import Report, compare
from rlxf.utils.checks import check_choice

NO_DATASTORE = "without memory"
OWN_TARGET = f"{NO_DATASTORE}, target from its own data"
CALLS = 50
"""Number of timed calls of ``predict``."""
DRAWS = 10_000
"""Number of bootstrap samples."""


@dataclass(frozen=True)
class Run:
    """Result of one agent with one output head.

    Args:
        head: name of the output head that reads the datastore.
        seed: random seed of the training.
        returns: returns of the evaluation episodes.
        lengths: lengths of these episodes, in steps.
        milliseconds: median CPU time of ``predict``, by the number of environments as a string.
        share: weight of the datastore, averaged over its keys; 0 without a datastore.
    """

    head: str
    seed: int
    returns: list[float]
    lengths: list[int]
    milliseconds: dict[str, float]
    share: float


@dataclass(frozen=True)
class Learned:
    """Results of one agent with each head."""

    runs: list[Run]


@dataclass
class Retrieval:
    """Returns and cost of a Decision Transformer with and without a datastore of other trajectories.

    Each agent is trained on one dataset. It then attaches a datastore of another dataset, without training,
    and its target return is the highest return of that dataset; without a datastore, also that of its own
    data. Several heads read the same datastore. Datasets are read from MINARI_DATASETS_PATH; Hopper requires
    the extra mujoco. Times are CPU times, so other processes on the machine matter little. Completed agents
    are lines of the output file and are not repeated.
    """

    dataset: str = "rlxf/hopper/medium-v0"
    """Minari id of the training data."""
    datastore: str = "rlxf/hopper/medium-expert-v0"
    """Minari id of the data of the datastore."""
    setting: str = "small"
    """Sizes: small (width 64, 2 layers) or published (width 128, 3 layers)."""
    updates: int = 10_000
    """Updates of each agent."""
    k: int = 32
    """Number of neighbors."""
    temperature: float = 3.0
    """Temperature of neighbor weights; 1 and 10 predicted actions of held-out episodes less well."""
    weights: tuple[float, ...] = (0.25, 0.5, 1.0)
    """Interpolation weights lambda of kNN-LM, one row each; SPALM is a further row."""
    seeds: int = 3
    """Agents."""
    episodes: int = 50
    """Episodes of an evaluation."""
    processes: int = 2
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-retrieval.jsonl")
    """Output file with the results of each agent."""

    def __post_init__(self) -> None:
        check_choice("setting", self.setting, tuple(SHORT))

    def run(self) -> None:
        """Train and evaluate missing agents, write each result, and print the tables."""
        jobs: dict[str, Callable[[], Learned]] = {
            self.key(seed): partial(self.learn, seed) for seed in range(self.seeds)
        }
        results = run_missing(jobs, self.processes, self.output).values()
        runs = [Run(**run) for result in results for run in result["runs"]]
        title = f"{self.dataset}, datastore {self.datastore}, {self.seeds} seeds"
        Console(width=120).print(compare(reports(runs), title, "head"), gains(runs), costs(runs))
        Console().print(f"numbers: {self.output}")

    def key(self, seed: int) -> str:
        """Return the key of an agent in the output file."""
        sizes = f"{self.setting}, {self.updates} updates, k {self.k}, T {self.temperature}, {self.weights}"
        return f"{self.dataset}, datastore {self.datastore}, {sizes}, {self.episodes} episodes, seed {seed}"

    def learn(self, seed: int) -> Learned:
        """Train one agent and evaluate it with each head."""
        agent = DecisionTransformer(self.dataset, seed=seed, device="cpu", **SHORT[self.setting].arguments())
        agent.learn(self.updates)
        data = load_trajectories(self.datastore)
        store = encode_dataset(agent.policy.eval(), agent.windows(data), agent.device)
        own, better = float(load_trajectories(self.dataset).returns.max()), float(data.returns.max())
        runs = [self.play(agent, store, OWN_TARGET, None, seed, own)]
        runs += [self.play(agent, store, name, head, seed, better) for name, head in self.heads().items()]
        return Learned(runs)

    def heads(self) -> dict[str, OutputHead | None]:
        """Return the output heads by name, without a head first."""
        options: dict[str, Any] = {"k": self.k, "temperature": self.temperature}
        fixed = {f"KNNLM, weight {weight:g}": KNNLM(weight=weight, **options) for weight in self.weights}
        return {NO_DATASTORE: None, **fixed, "SPALM": SPALM(**options)}

    def play(
        self,
        agent: DecisionTransformer,
        store: Datastore,
        name: str,
        head: OutputHead | None,
        seed: int,
        target: float,
    ) -> Run:
        """Evaluate the agent with a head that reads the datastore; None: without a datastore."""
        agent.datastore = None if head is None else agent.build_datastore(store, head)
        env = agent.make_env(self.episodes)
        report = evaluate(agent, env, self.episodes, target_returns=[target]).first
        milliseconds = {str(envs): acting_milliseconds(agent, envs, target) for envs in (1, 50)}
        share = 0.0 if agent.datastore is None else mean_weight(agent.datastore)
        return Run(name, seed, report.returns.tolist(), report.lengths.tolist(), milliseconds, share)


@torch.no_grad()
def mean_weight(memory: ActionDatastore) -> float:
    """Return the mean weight of the datastore in predictions, averaged over its keys."""
    return memory.reader.neighbor_weight(memory.store.keys).mean().item()


def acting_milliseconds(agent: DecisionTransformer, envs: int, target: float) -> float:
    """Return the median CPU time of ``predict`` in ms; all steps of an episode have equal cost."""
    observation = ReturnToGo(agent.make_env(envs, seed=0), target).reset()
    times = []
    for _ in range(CALLS):
        start = time.process_time()
        agent.predict(observation)
        times.append(1000 * (time.process_time() - start))
    return median(times)


def reports(runs: list[Run]) -> dict[str, Report]:
    """Return the reports of each head over all seeds, and of each seed."""
    results = {}
    for name in dict.fromkeys(run.head for run in runs):
        own = [run for run in runs if run.head == name]
        results[name] = as_report(own)
        results |= {f"  seed {run.seed}, {name}": as_report([run]) for run in own}
    return results


def gains(runs: list[Run]) -> Table:
    """Return the table of gains of each head over the same agents without a datastore."""
    table = Table("head", "gain of each seed", "mean", "95%, over episodes", "95%, over agents, too")
    baseline = returns_of(runs, NO_DATASTORE)
    seeds = len(baseline)
    agents = np.arange(seeds)[None], np.random.default_rng(1).integers(seeds, size=(DRAWS, seeds))
    for name in dict.fromkeys(run.head for run in runs):
        own = returns_of(runs, name)
        each = own.mean(axis=1) - baseline.mean(axis=1)
        cells = (interval(own, baseline, drawn) for drawn in agents)
        table.add_row(name, ", ".join(f"{gain:.0f}" for gain in each), f"{each.mean():.0f}", *cells)
    return table


def returns_of(runs: list[Run], head: str) -> np.ndarray:
    """Return the returns (seeds, episodes) of a head."""
    return np.array([run.returns for run in runs if run.head == head])


def interval(own: np.ndarray, baseline: np.ndarray, agents: np.ndarray) -> str:
    """Return the percentile bootstrap interval of the mean gain, over ``agents`` (DRAWS or 1, seeds)."""
    rng, gain = np.random.default_rng(0), np.zeros(DRAWS)
    for returns, sign in ((own, 1), (baseline, -1)):
        episodes = rng.integers(returns.shape[1], size=(DRAWS, *returns.shape))
        gain += sign * returns[agents[..., None], episodes].mean(axis=(1, 2))
    return "{:.0f} to {:.0f}".format(*np.percentile(gain, [2.5, 97.5]))


def costs(runs: list[Run]) -> Table:
    """Return the table of acting costs and datastore weights of each head."""
    counts = list(runs[0].milliseconds)
    table = Table(
        "head",
        *(f"ms, {envs} environments" for envs in counts),
        "weight of the datastore",
        title="CPU time of predict, one thread",
    )
    for name in dict.fromkeys(run.head for run in runs):
        own = [run for run in runs if run.head == name]
        times = [f"{median(run.milliseconds[envs] for run in own):.1f}" for envs in counts]
        table.add_row(name, *times, f"{median(run.share for run in own):.2f}")
    return table
