"""Success of Decision Transformers in corridors up to 64 times as long as those of their training."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.result_cache import check_names, run_missing
from benchmarks.update_clock import UpdateClock
from rlxf import DecisionTransformer, evaluate
from rlxf.attention import (
    KNN,
    RATE,
    RMT,
    XL,
    Compressive,
    GatedDeltaNet,
    MinGRU,
    TransformerSpec,
    Window,
    XLRelative,
)
from rlxf.data import Trajectories
from rlxf.envs.tmaze import DOWN, RIGHT, UP, TMaze
from rlxf.envs.tmaze_vector import TMazeVector
from rlxf.training import linear

LENGTHS = (9, 30, 90, 150, 300, 600, 1200, 2400, 4800, 9600)
"""Corridors of the evaluation."""
SEGMENTS, STEP_TOKENS = 5, 3
"""Segments, and raw memories, in the longest corridor of the training; tokens of a step."""
WINDOW_LIMIT = 4
"""Limit of the corridors of the agent with a window, in units of its window, which each step processes."""
EPISODES = 2000
"""Episodes in the data of an agent."""


def cores(longest: int) -> dict[str, TransformerSpec]:
    """Return the cores by name; the last one has no memory and acts from a window.

    Args:
        longest: longest corridor of the training, in steps.
    """
    segment = STEP_TOKENS * longest // SEGMENTS
    spec = TransformerSpec(width=64, layers=2, heads=4)
    relative = replace(spec, position=XLRelative())
    raw = replace(relative, pattern=Window(segment + 1))
    return {
        "RATE": replace(relative, memory=RATE(segment, tokens=5)),
        "RMT": replace(relative, memory=RMT(segment, tokens=5)),
        "GatedDeltaNet": replace(spec, recurrence=GatedDeltaNet()),
        "MinGRU": replace(spec, recurrence=MinGRU()),
        "XL": replace(raw, memory=XL(segment)),
        "Compressive": replace(relative, memory=Compressive(segment, segment, 4)),
        "KNN": replace(raw, memory=KNN(segment, far=2048)),
        "window": relative,
    }


CORES = tuple(cores(150))


@dataclass(frozen=True)
class Run:
    """Result of one agent.

    Args:
        core: name of the core.
        longest: longest corridor of the training.
        seed: random seed.
        success: success rate by length of the corridor.
        loss: mean loss of the last hundred updates.
        update: median milliseconds of CPU time of an update.
        acting: milliseconds of CPU time of a step of all episodes, in the longest corridor.
    """

    core: str
    longest: int
    seed: int
    success: dict[str, float]
    loss: float
    update: float
    acting: float


@dataclass
class Corridors:
    """Decision Transformers with memory, evaluated in T-Mazes up to 64 times as long as in training.

    The protocol is that of RATE (Cherepanov et al. 2023, arXiv:2306.09459, section 5). The data are 2,000
    episodes of an oracle in passive T-Mazes, whose corridors have 9 to 150 steps, drawn uniformly. The only
    reward is 1 in the arm of the goal. Without memory of the hint in the first step, success is 0.5 at best.

    Each agent has width 64, 2 layers and 4 heads. A window of K = 151 steps is a whole episode, so gradients
    reach the hint. All but the last core act with context="episode". Segments and raw memories have a fifth
    of the longest corridor, 90 tokens or 30 steps: a path through both layers of XL reaches 60 steps,
    Compressive 300, KNN about 700, and the window 151. All time steps share one embedding, which makes longer
    episodes possible. Success is that of the last weights, over 64 episodes of each length, with the target
    return 1; the agent with a window acts in up to 600 steps only.

    Completed agents are lines of the output file and are not repeated. Times are CPU times of one thread.
    """

    cores: tuple[str, ...] = CORES
    """Names of the cores."""
    shortest: int = 9
    """Shortest corridor of the training. Cores with segments learn faster if it is within a segment."""
    longest: int = 150
    """Longest corridor of the training."""
    lengths: tuple[int, ...] = LENGTHS
    """Corridors of the evaluation."""
    seeds: int = 3
    """Agents of each core."""
    updates: int = 2000
    """Updates of each agent."""
    batch_size: int = 16
    """Windows per update."""
    episodes: int = 64
    """Episodes of each length in the evaluation."""
    processes: int = 1
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-corridors.jsonl")
    """Output file with a line for each agent."""

    def __post_init__(self) -> None:
        check_names(cores=(self.cores, CORES))

    def run(self) -> None:
        """Train and evaluate missing agents, write each result, and print the table."""
        jobs: dict[str, Callable[[], Run]] = {
            self.key(core, seed): partial(self.learn, core, seed)
            for seed in range(self.seeds)
            for core in self.cores
        }
        runs = [Run(**run) for run in run_missing(jobs, self.processes, self.output).values()]
        Console(width=160).print(table(runs))
        Console().print(f"numbers: {self.output}")

    def key(self, core: str, seed: int) -> str:
        """Return the key of an agent in the output file."""
        sizes = f"{self.shortest} to {self.longest}, {self.updates} updates of {self.batch_size}"
        lengths = ", ".join(map(str, self.lengths_of(core)))
        return f"{core}, {sizes}, {self.episodes} episodes in corridors of {lengths}, seed {seed}"

    def lengths_of(self, core: str) -> list[int]:
        """Return the corridors of the evaluation of a core."""
        most = WINDOW_LIMIT * self.longest if core == "window" else max(self.lengths)
        return [length for length in self.lengths if length <= most]

    def agent(self, core: str, seed: int) -> DecisionTransformer:
        """Build an untrained agent."""
        return DecisionTransformer(
            oracle_episodes(EPISODES, self.shortest, self.longest, seed),
            context_length=self.longest + 1,
            learning_rate=linear(3e-3, 3e-4),
            batch_size=self.batch_size,
            max_grad_norm=1.0,
            episode_length=1,
            core=cores(self.longest)[core],
            context="window" if core == "window" else "episode",
            seed=seed,
            device="cpu",
        )

    def learn(self, core: str, seed: int) -> Run:
        """Train and evaluate one agent."""
        agent, clock = self.agent(core, seed), UpdateClock(time.process_time)
        agent.learn(self.updates, callback=clock, log_interval=self.updates + 1)
        loss = agent._update.metrics()["loss"][-100:].mean().item()
        success, seconds = {}, 0.0
        for length in self.lengths_of(core):
            start = time.process_time()
            success[str(length)] = success_rate(agent, length, self.episodes)
            seconds = (time.process_time() - start) / (length + 1)
        return Run(core, self.longest, seed, success, loss, 1000 * median(clock.durations), 1000 * seconds)


def oracle_episodes(episodes: int, shortest: int, longest: int, seed: int) -> Trajectories:
    """Return episodes of the shortest path to the goal, in corridors of random length."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, episodes) + 1
    offsets = np.cumsum([0, *lengths])
    first, last, up = offsets[:-1], offsets[1:] - 1, rng.integers(0, 2, episodes).astype(np.bool_)
    observations = np.zeros((offsets[-1], 2), np.float32)
    observations[first, 1], observations[last, 0] = np.where(up, 1.0, -1.0), 1.0
    actions, rewards = np.full(offsets[-1], RIGHT), np.zeros(offsets[-1], np.float32)
    actions[last], rewards[last] = np.where(up, UP, DOWN), 1.0
    ends, maze = np.ones(episodes, np.bool_), TMaze()
    return Trajectories(
        observations=observations,
        actions=actions,
        rewards=rewards,
        return_to_go=np.ones_like(rewards),
        offsets=offsets,
        terminated=ends,
        truncated=~ends,
        observation_mean=observations.mean(axis=0),
        observation_std=observations.std(axis=0),
        observation_space=maze.observation_space,
        action_space=maze.action_space,
    )


def success_rate(agent: DecisionTransformer, length: int, episodes: int) -> float:
    """Return the success rate in corridors of one length, with one environment for each episode."""
    env = TMazeVector(episodes, length, penalty=0.0)
    report = evaluate(agent, env, episodes, target_returns=[1.0]).first
    return float((report.returns == 1).mean())


def table(runs: Sequence[Run]) -> Table:
    """Return the success rates of each core."""
    lengths = sorted({int(length) for run in runs for length in run.success})
    result = Table("core", *(f"{length:,}" for length in lengths), "ms per update", "ms per step")
    for row in rows(runs, lengths):
        result.add_row(*row)
    return result


def rows(runs: Sequence[Run], lengths: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each core: success rates of its seeds by length of the corridor, and times."""
    for core in dict.fromkeys(run.core for run in runs):
        own = [run for run in runs if run.core == core]
        costs = (f"{median(getattr(run, name) for run in own):.1f}" for name in ("update", "acting"))
        yield core, *(rates(own, str(length)) for length in lengths), *costs


def rates(runs: Sequence[Run], length: str) -> str:
    """Return the success rates of the seeds of a core in corridors of one length."""
    return ", ".join(f"{run.success[length]:.2f}" for run in runs if length in run.success)
