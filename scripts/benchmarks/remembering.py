"""What a memory of better trajectories does for a Decision Transformer, and what it costs."""

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

from benchmarks.kept import made
from benchmarks.offline_setting import SHORT
from rlxf import DecisionTransformer, evaluate
from rlxf.agents.decision_transformer.encoding import encoded
from rlxf.agents.decision_transformer.remembering import memory_of
from rlxf.agents.memory import Memory
from rlxf.attention import KNNLM, SPALM
from rlxf.attention.heads.base import OutputHead
from rlxf.attention.heads.datastore import Datastore
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.envs.trajectories import load_trajectories
from rlxf.evaluation import Report, compare

ALONE = "without memory"
OWN = f"{ALONE}, asked for its own data's best"
CALLS = 50
"""Calls of ``predict`` that are timed."""
DRAWS = 10_000
"""Of a bootstrap."""


@dataclass(frozen=True)
class Run:
    """One agent with one head.

    Args:
        head: how it reads its memory.
        seed: of its training.
        returns: of the evaluation's episodes.
        lengths: of the same, in steps.
        milliseconds: processor time of ``predict``, the median, by the number of environments in words.
        share: how much the memory counts, on average over what is stored; 0 without.
    """

    head: str
    seed: int
    returns: list[float]
    lengths: list[int]
    milliseconds: dict[str, float]
    share: float


@dataclass(frozen=True)
class Learned:
    """One agent, with each head."""

    runs: list[Run]


@dataclass
class Remembering:
    """Returns and cost of a Decision Transformer before and after it remembers trajectories of others.

    Each agent learns from one dataset, then remembers another one, without learning, and is asked for the
    highest return of that; before, of its own data, too. One memory is read by several heads. Datasets are
    read from MINARI_DATASETS_PATH; Hopper needs the extra mujoco. Processor time counts: other work on the
    machine matters little. An agent that is done is a line of the output and is not made again.
    """

    dataset: str = "rlxf/hopper/medium-v0"
    """Minari id of what is learned from."""
    remembered: str = "rlxf/hopper/medium-expert-v0"
    """Minari id of what is remembered."""
    setting: str = "small"
    """Sizes: small (width 64, 2 layers) or published (width 128, 3 layers)."""
    updates: int = 10_000
    """Updates of each agent."""
    k: int = 32
    """Neighbours."""
    temperature: float = 3.0
    """Of their weights; at 1 and 10 the actions of other episodes of the data were foretold less well."""
    weights: tuple[float, ...] = (0.25, 0.5, 1.0)
    """Shares lambda of kNN-LM, each a row; SPALM is another."""
    seeds: int = 3
    """Agents."""
    episodes: int = 50
    """Episodes of an evaluation."""
    processes: int = 2
    """Agents at a time, one thread each."""
    output: Path = Path("runs/bench-remembering.jsonl")
    """Where to write each agent's numbers."""

    def __post_init__(self) -> None:
        if self.setting not in SHORT:
            raise ValueError(f"setting must be one of {', '.join(SHORT)}, got {self.setting!r}")

    def run(self) -> None:
        """Train and evaluate what is missing, print the tables, write each agent as it is done."""
        jobs: dict[str, Callable[[], Learned]] = {
            self.key(seed): partial(self.learn, seed) for seed in range(self.seeds)
        }
        found = made(jobs, self.processes, self.output).values()
        runs = [Run(**run) for learned in found for run in learned["runs"]]
        title = f"{self.dataset}, remembering {self.remembered}, {self.seeds} seeds"
        Console(width=120).print(compare(reports(runs), title, "head"), gains(runs), costs(runs))
        Console().print(f"numbers: {self.output}")

    def key(self, seed: int) -> str:
        """What tells an agent from others."""
        sizes = f"{self.setting}, {self.updates} updates, k {self.k}, T {self.temperature}, {self.weights}"
        return (
            f"{self.dataset}, remembering {self.remembered}, {sizes}, {self.episodes} episodes, seed {seed}"
        )

    def learn(self, seed: int) -> Learned:
        """One agent from its first update to its evaluations."""
        agent = DecisionTransformer(self.dataset, seed=seed, device="cpu", **SHORT[self.setting].arguments())
        agent.learn(self.updates)
        data = load_trajectories(self.remembered)
        store = encoded(agent.policy.eval(), agent.windows(data), agent.device)
        own, better = float(load_trajectories(self.dataset).returns.max()), float(data.returns.max())
        runs = [self.play(agent, store, OWN, None, seed, own)]
        runs += [self.play(agent, store, name, head, seed, better) for name, head in self.heads().items()]
        return Learned(runs)

    def heads(self) -> dict[str, OutputHead | None]:
        """By name: none first."""
        options: dict[str, Any] = {"k": self.k, "temperature": self.temperature}
        fixed = {f"KNNLM, weight {weight:g}": KNNLM(weight=weight, **options) for weight in self.weights}
        return {ALONE: None, **fixed, "SPALM": SPALM(**options)}

    def play(
        self,
        agent: DecisionTransformer,
        store: Datastore,
        name: str,
        head: OutputHead | None,
        seed: int,
        target: float,
    ) -> Run:
        """The agent with a head on what is stored; with none, by itself."""
        agent.memory = None if head is None else memory_of(agent, store, head)
        env = agent.make_env(self.episodes)
        report = evaluate(agent, env, self.episodes, target_returns=[target]).first
        milliseconds = {str(envs): acting_milliseconds(agent, envs, target) for envs in (1, 50)}
        share = 0.0 if agent.memory is None else mean_share(agent.memory)
        return Run(name, seed, report.returns.tolist(), report.lengths.tolist(), milliseconds, share)


@torch.no_grad()
def mean_share(memory: Memory) -> float:
    """How much the memory counts beside the agent, where it was made."""
    return memory.reader.share(memory.store.keys).mean().item()


def acting_milliseconds(agent: DecisionTransformer, envs: int, target: float) -> float:
    """Processor time of ``predict`` for so many environments, the median. All steps cost the same."""
    observation = ReturnToGo(agent.make_env(envs, seed=0), target).reset()
    took = []
    for _ in range(CALLS):
        start = time.process_time()
        agent.predict(observation)
        took.append(1000 * (time.process_time() - start))
    return median(took)


def reports(runs: list[Run]) -> dict[str, Report]:
    """The episodes of all seeds for each head, and of each seed."""
    found = {}
    for name in dict.fromkeys(run.head for run in runs):
        own = [run for run in runs if run.head == name]
        found[name] = as_report(own)
        found |= {f"  seed {run.seed}, {name}": as_report([run]) for run in own}
    return found


def gains(runs: list[Run]) -> Table:
    """What each head adds to the mean return of the same agents without memory."""
    table = Table("head", "gain of each seed", "mean", "95%, over episodes", "95%, over agents, too")
    alone = returns_of(runs, ALONE)
    seeds = len(alone)
    agents = np.arange(seeds)[None], np.random.default_rng(1).integers(seeds, size=(DRAWS, seeds))
    for name in dict.fromkeys(run.head for run in runs):
        own = returns_of(runs, name)
        each = own.mean(axis=1) - alone.mean(axis=1)
        cells = (interval(own, alone, drawn) for drawn in agents)
        table.add_row(name, ", ".join(f"{gain:.0f}" for gain in each), f"{each.mean():.0f}", *cells)
    return table


def returns_of(runs: list[Run], head: str) -> np.ndarray:
    """(seeds, episodes)."""
    return np.array([run.returns for run in runs if run.head == head])


def interval(own: np.ndarray, alone: np.ndarray, agents: np.ndarray) -> str:
    """Percentile bootstrap of the mean gain: ``agents`` (DRAWS or 1, seeds), and of each drawn episodes."""
    rng, gain = np.random.default_rng(0), np.zeros(DRAWS)
    for returns, sign in ((own, 1), (alone, -1)):
        episodes = rng.integers(returns.shape[1], size=(DRAWS, *returns.shape))
        gain += sign * returns[agents[..., None], episodes].mean(axis=(1, 2))
    return "{:.0f} to {:.0f}".format(*np.percentile(gain, [2.5, 97.5]))


def as_report(runs: list[Run]) -> Report:
    """All their episodes in one."""
    returns, lengths = (
        np.concatenate([getattr(run, what) for run in runs]) for what in ("returns", "lengths")
    )
    return Report(returns, lengths)


def costs(runs: list[Run]) -> Table:
    """What a step costs with each head, and how much the memory counts."""
    counts = list(runs[0].milliseconds)
    table = Table(
        "head",
        *(f"ms, {envs} environments" for envs in counts),
        "share of the memory",
        title="processor time of predict, one thread",
    )
    for name in dict.fromkeys(run.head for run in runs):
        own = [run for run in runs if run.head == name]
        times = [f"{median(run.milliseconds[envs] for run in own):.1f}" for envs in counts]
        table.add_row(name, *times, f"{median(run.share for run in own):.2f}")
    return table
