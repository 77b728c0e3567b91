"""Success of offline agents in a maze whose data contain no episode from the start to the goal."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest

from benchmarks.result_cache import check_names, run_missing
from benchmarks.update_clock import UpdateClock
from rlxf import BehaviorCloning, DecisionTransformer, evaluate
from rlxf.agents.decision_transformer import (
    HighestValueReturn,
    MaxReturn,
    QRegularized,
    decision_transformer,
)
from rlxf.data import Trajectories
from rlxf.envs.stitching_data import road_episodes

TARGET = 1.0
"""Target return of the agents that need one: the return of the goal."""
Agent = BehaviorCloning | DecisionTransformer
CLONING = {"BehaviorCloning": 1.0, "BehaviorCloning, best 10%": 0.1}
"""Share of the episodes that each kind of behavior cloning imitates."""
CRITIC = QRegularized(n_steps=1, discount=0.9, target_rate=0.02)
"""Critic whose values depend on no later action of the data, and differ clearly between actions."""
TRANSFORMERS: Mapping[str, Mapping[str, Any]] = {
    "DecisionTransformer, target 1": {},
    "DecisionTransformer, MaxReturn": {"conditioning": MaxReturn()},
    "QRegularized, target 1": {"objective": CRITIC},
    "QRegularized, MaxReturn": {"conditioning": MaxReturn(), "objective": CRITIC},
    "QRegularized, HighestValueReturn": {"conditioning": HighestValueReturn(), "objective": CRITIC},
}
"""Arguments of each kind of `DecisionTransformer`."""
KINDS = (*CLONING, *TRANSFORMERS)


@dataclass(frozen=True)
class Run:
    """Result of one agent.

    Args:
        kind: kind of the agent.
        seed: random seed.
        successes: number of episodes that reached the goal.
        episodes: number of episodes of the evaluation.
        update: median milliseconds of CPU time of an update.
        seconds: seconds of CPU time of the training.
    """

    kind: str
    seed: int
    successes: int
    episodes: int
    update: float
    seconds: float


@dataclass
class Stitching:
    """Trajectory stitching: agents trained on two crossing roads, none of which leads from start to goal.

    The data are 200 episodes of `rlxf.envs.road_episodes`, whose actions are noisy, so that a critic learns
    the values of other actions than those along the roads: three of four go from the start to a dead end, the
    others from another place through the same crossing to the goal. The only reward is 1 in the goal. The
    seed of an agent is also that of its data. Success is that of the last weights, from the start.
    Transformers have width 64, 2 layers and a context of K steps, in which the road before the crossing is
    visible. An average of their weights acts. The settings were chosen with the seeds 1, 2 and 11, which
    are therefore not among the default seeds.

    Intervals are Wilson's for all episodes of a kind. Episodes of one agent are alike, so the rates of its
    seeds are printed in addition.

    Completed agents are lines of the output file and are not repeated. Times are CPU times of one thread.
    """

    kinds: tuple[str, ...] = KINDS
    """Kinds of agents."""
    seeds: int = 5
    """Agents of each kind."""
    first_seed: int = 20
    """Seed of the first agent; the others have the next numbers."""
    noise: float = 0.7
    """Standard deviation of the noise on the actions of the data, in steps."""
    updates: int = 4000
    """Updates of each agent."""
    context_length: int = 4
    """Context K of transformers, in steps."""
    learning_rate: float = 1e-3
    """Learning rate of all agents."""
    weight_averaging: float = 0.995
    """Decay of the average of the weights of transformers."""
    episodes: int = 50
    """Episodes of each evaluation."""
    discrete: bool = False
    """Use the maze with discrete actions."""
    processes: int = 1
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-stitching.jsonl")
    """Output file with a line for each agent."""

    def __post_init__(self) -> None:
        check_names(kinds=(self.kinds, KINDS))

    def run(self) -> None:
        """Train and evaluate missing agents, write each result, and print the table."""
        jobs: dict[str, Callable[[], Run]] = {
            self.key(kind, seed): partial(self.learn, kind, seed)
            for seed in range(self.first_seed, self.first_seed + self.seeds)
            for kind in self.kinds
        }
        runs = [Run(**run) for run in run_missing(jobs, self.processes, self.output).values()]
        Console(width=120).print(table(runs))
        Console().print(f"numbers: {self.output}")

    def key(self, kind: str, seed: int) -> str:
        """Return the key of an agent in the output file."""
        actions = "discrete" if self.discrete else "continuous"
        sizes = f"{self.updates} updates at {self.learning_rate:g}, K={self.context_length}"
        sizes += f", average {self.weight_averaging:g}, noise {self.noise:g}"
        return f"{kind}, {actions}, {sizes}, {self.episodes} episodes, seed {seed}"

    def data(self, seed: int) -> Trajectories:
        """Return the data of the agents of a seed."""
        return road_episodes(seed=seed, continuous=not self.discrete, noise=self.noise)

    def agent(self, kind: str, seed: int) -> Agent:
        """Build an untrained agent."""
        common: dict[str, Any] = {"learning_rate": self.learning_rate, "seed": seed, "device": "cpu"}
        if kind in CLONING:
            return BehaviorCloning(self.data(seed), best=CLONING[kind], **common)
        core = decision_transformer(width=64, layers=2, heads=2, dropout=0.0)
        common |= {"context_length": self.context_length, "weight_averaging": self.weight_averaging}
        return DecisionTransformer(self.data(seed), core=core, **TRANSFORMERS[kind], **common)

    def learn(self, kind: str, seed: int) -> Run:
        """Train and evaluate one agent."""
        agent, clock, start = self.agent(kind, seed), UpdateClock(time.process_time), time.process_time()
        agent.learn(self.updates, callback=clock)
        seconds = time.process_time() - start
        successes = count_successes(agent, self.episodes)
        return Run(kind, seed, successes, self.episodes, 1000 * median(clock.durations), seconds)


def count_successes(agent: Agent, episodes: int) -> int:
    """Count the episodes that reach the goal, with the target return 1 if the agent needs one."""
    if agent.return_conditioned:
        report = evaluate(agent, episodes=episodes, target_returns=[TARGET], n_envs=episodes).first
    else:
        report = evaluate(agent, episodes=episodes, n_envs=episodes)
    return int((report.returns == 1).sum())


def table(runs: Sequence[Run]) -> Table:
    """Return the success rates of each kind of agent."""
    result = Table("agent", "success", "95% interval", "seeds", "ms per update", "CPU seconds")
    for row in rows(runs):
        result.add_row(*row)
    return result


def rows(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each kind: success rate with its interval, rates of its seeds, and times."""
    for kind in dict.fromkeys(run.kind for run in runs):
        own = [run for run in runs if run.kind == kind]
        successes, episodes = sum(run.successes for run in own), sum(run.episodes for run in own)
        low, high = wilson_interval(successes, episodes)
        rates = ", ".join(f"{run.successes / run.episodes:.2f}" for run in own)
        update, seconds = (median(getattr(run, name) for run in own) for name in ("update", "seconds"))
        success = f"{successes / episodes:.2f}"
        yield kind, success, f"{low:.2f} to {high:.2f}", rates, f"{update:.1f}", f"{seconds:.0f}"


def wilson_interval(successes: int, episodes: int) -> tuple[float, float]:
    """Return the 95% interval of a success rate.

    Source: Wilson 1927, Journal of the American Statistical Association 22(158).
    """
    low, high = binomtest(successes, episodes).proportion_ci(0.95, method="wilson")
    return float(low), float(high)
