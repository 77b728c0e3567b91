"""Benefit of masked pre-training on all trajectories if only some of them are used for fine-tuning."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.offline_setting import SHORT
from benchmarks.result_cache import run_missing
from rlxf import DecisionTransformer, evaluate
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.data import Trajectories, load_trajectories
from rlxf.evaluation import Report, compare

INITIALIZATIONS = {True: "pre-trained", False: "fresh weights"}


@dataclass(frozen=True)
class Run:
    """Result of one agent.

    Args:
        pretrained: whether the agent was initialized with pre-trained weights.
        seed: random seed.
        returns: returns of the evaluation episodes.
        lengths: lengths of these episodes, in steps.
    """

    pretrained: bool
    seed: int
    returns: list[float]
    lengths: list[int]

    @property
    def report(self) -> Report:
        """Evaluation of the agent."""
        return Report(np.array(self.returns), np.array(self.lengths))


@dataclass
class Pretraining:
    """Masked pre-training on all windows of a dataset, then a Decision Transformer on a part of its episodes.

    Each seed selects another random part. An agent with random initial weights is trained on the same part
    for as many updates. The target return of both is the largest return in the data. The dataset is read from
    MINARI_DATASETS_PATH; Hopper requires the extra mujoco. Completed agents are lines of the output file and
    are not repeated.
    """

    dataset: str = "rlxf/hopper/medium-v0"
    """Minari id."""
    setting: str = "small"
    """Sizes: small (width 64, 2 layers) or published (width 128, 3 layers)."""
    share: float = 0.1
    """Fraction of the episodes that is used for fine-tuning."""
    pretraining_updates: int = 10_000
    """Updates of masked pre-training."""
    updates: int = 5_000
    """Updates of each agent."""
    seeds: int = 3
    """Agents with and without pre-training."""
    episodes: int = 50
    """Episodes of an evaluation."""
    processes: int = 2
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-pretraining.jsonl")
    """Output file with the returns of each agent."""

    def __post_init__(self) -> None:
        if self.setting not in SHORT:
            raise ValueError(f"setting must be one of {', '.join(SHORT)}, got {self.setting!r}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be more than 0 and at most 1, got {self.share}")

    def run(self) -> None:
        """Train and evaluate missing agents, write each result, and print the table."""
        load_trajectories(self.dataset)  # convert the data once, before processes read it
        jobs: dict[str, Callable[[], Run]] = {
            self.key(seed, begun): partial(self.learn, seed, begun)
            for seed in range(self.seeds)
            for begun in INITIALIZATIONS
        }
        runs = [Run(**run) for run in run_missing(jobs, self.processes, self.output).values()]
        Console(width=120).print(self.table(runs), f"numbers: {self.output}")

    def key(self, seed: int, pretrained: bool) -> str:
        """Return the key of an agent in the output file."""
        begun = f"{self.pretraining_updates} updates before" if pretrained else INITIALIZATIONS[False]
        task = f"{self.dataset}, {self.share:g} of it, {self.setting}, {self.updates} updates"
        return f"{task}, {begun}, {self.episodes} episodes, seed {seed}"

    def learn(self, seed: int, pretrained: bool) -> Run:
        """Train and evaluate one agent."""
        whole, settings = load_trajectories(self.dataset), SHORT[self.setting].arguments()
        part = some_episodes(whole, self.share, seed)
        agent = DecisionTransformer(part, episode_length=int(whole.lengths.max()), seed=seed, **settings)
        if pretrained:
            agent.load_pretrained(
                MaskedPretraining(whole, seed=seed, **settings).learn(self.pretraining_updates)
            )
        agent.learn(self.updates)
        target = float(whole.returns.max())
        report = evaluate(agent, agent.make_env(self.episodes), self.episodes, target_returns=[target]).first
        return Run(pretrained, seed, report.returns.tolist(), report.lengths.tolist())

    def table(self, runs: list[Run]) -> Table:
        """Return the table of results over all seeds, and of each agent."""
        rows: dict[str, Report] = {}
        for pretrained, name in INITIALIZATIONS.items():
            group = [run for run in runs if run.pretrained == pretrained]
            returns, lengths = (
                np.concatenate([getattr(run.report, field) for run in group])
                for field in ("returns", "lengths")
            )
            rows[f"{name}, {len(group)} seeds"] = Report(returns, lengths)
            rows |= {f"  {name}, seed {run.seed}": run.report for run in group}
        return compare(rows, f"{self.dataset}, {self.share:.0%} of the episodes", "")


def some_episodes(data: Trajectories, share: float, seed: int) -> Trajectories:
    """Return a random part of the episodes, at least one, with the normalization of all episodes."""
    number = max(1, round(share * data.episodes))
    chosen = np.sort(np.random.default_rng(seed).permutation(data.episodes)[:number])
    bounds = [slice(*data.offsets[e : e + 2].tolist()) for e in chosen]

    def part(array: NDArray) -> NDArray:
        return np.concatenate([array[steps] for steps in bounds])

    return replace(
        data,
        observations=part(data.observations),
        actions=part(data.actions),
        rewards=part(data.rewards),
        return_to_go=part(data.return_to_go),
        offsets=np.cumsum([0, *data.lengths[chosen]]),
        terminated=data.terminated[chosen],
        truncated=data.truncated[chosen],
    )
