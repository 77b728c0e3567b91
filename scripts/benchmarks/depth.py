"""What depth that adapts saves at equal return: passes and time of a step. And whether promises are kept."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.kept import made
from benchmarks.offline_setting import SHORT
from benchmarks.ours import FEWER_UPDATES
from benchmarks.promises import promises
from rlxf import DecisionTransformer, evaluate
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.agents.gtrxl.core import gtrxl
from rlxf.attention import ACT, CALM, DepthAdaptive, Fixed, Universal
from rlxf.attention.depth.base import Depth
from rlxf.attention.depth.calm import Confidence
from rlxf.envs.make import make_vec_env
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.envs.trajectories import load_trajectories
from rlxf.evaluation import Report, compare

ENVS = 32


@dataclass(frozen=True)
class Measured:
    """How one agent acts.

    Args:
        passes: taken on average by a step of one environment.
        milliseconds: processor time of that step, on average.
        returns: of the evaluation's episodes.
        lengths: of the same, in steps.
    """

    passes: float
    milliseconds: float
    returns: list[float]
    lengths: list[int]


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        ways: by name: with all passes, and as early as it may; one alone, without a name, but for CALM.
        threshold: of confidence, that was found for CALM; None for others, infinite where none was kept.
    """

    ways: dict[str, Measured]
    threshold: float | None = None


@dataclass
class DepthBench:
    """Passes taken, returns with intervals and time of a step: the same agent with several kinds of depth.

    GTrXLPPO on a T-Maze: Fixed; Universal, one layer again and again, and ACT, which is that until it has had
    enough; CALM by softmax. A Decision Transformer on a Minari dataset, read from MINARI_DATASETS_PATH: the
    same and DepthAdaptive. Hopper needs the extra mujoco; its actions are numbers, so CALM goes by a
    classifier there. CALM's agents are evaluated twice, with all passes and with the threshold that
    `calibrate` found: in episodes played for it, or in those of the data, which the agent learned from, and
    which promise less.

    Last, calibrations are simulated, to count how many break their promise. A training that is done is a line
    of the output and is not made again. A step is one of a single environment: of many, the slowest counts.
    """

    kinds: tuple[str, ...] = ("online", "offline")
    """Out of online (GTrXLPPO) and offline (Decision Transformer)."""
    only: tuple[str, ...] = ()
    """Names of depths to try; all, if none is given."""
    layers: int = 4
    """The most passes that a token can take."""
    corridor: int = 50
    """Length of the T-Maze's corridor."""
    steps: int = 200_000
    """Steps in the environment of each GTrXLPPO."""
    dataset: str = "rlxf/hopper/medium-v0"
    """Minari id."""
    updates: int = 10_000
    """Updates of each Decision Transformer: width 64, the small setting but for its layers."""
    ponder_cost: float = 0.01
    """ACT's, of a pass."""
    penalty: float = 0.1
    """DepthAdaptive's, of a pass."""
    exit_coef: float = 1.0
    """How much CALM's and DepthAdaptive's outputs before the last count; at 1 as in their papers."""
    alpha: float = 0.05
    """Share of other actions in an episode that CALM promises not to exceed on average."""
    delta: float = 0.05
    """Probability with which it may be exceeded."""
    seeds: int = 3
    """Trainings of each."""
    episodes: int = 100
    """Of an evaluation; and at least as many of a calibration that plays."""
    timed: int = 510
    """Steps of one environment whose passes and time are taken."""
    simulations: int = 200
    """Calibrations that are simulated."""
    processes: int = 1
    """Trainings at a time, one thread each. More disturb the times."""
    output: Path = Path("runs/bench-depth.jsonl")
    """Where to write each training."""

    def __post_init__(self) -> None:
        if unknown := set(self.kinds) - {"online", "offline"}:
            raise ValueError(f"kinds must be among online and offline, got {sorted(unknown)}")
        if unknown := set(self.only) - set(self.depths("offline")):
            raise ValueError(f"there is no {sorted(unknown)}; there are {', '.join(self.depths('offline'))}")

    def run(self) -> None:
        """Train what is missing, print the tables, write each training as it ends."""
        jobs = {self.key(*job): partial(self.train, *job) for job in self.jobs()}
        found = made(jobs, self.processes, self.output)
        console = Console(width=130)
        for kind in self.kinds:
            runs = {job[1:]: as_run(found[self.key(*job)]) for job in self.jobs() if job[0] == kind}
            console.print(compare(reports(runs), self.title(kind), "depth"), savings(runs))
        console.print(promises(self.simulations), f"numbers: {self.output}")

    def jobs(self) -> list[tuple[str, str, int]]:
        """Kind, depth and seed of each training."""
        return [
            (kind, name, seed)
            for kind in self.kinds
            for seed in range(self.seeds)
            for name in self.depths(kind)
            if name in (self.only or self.depths(kind))
        ]

    def key(self, kind: str, name: str, seed: int) -> str:
        """What tells a training from others."""
        task = {
            "online": f"T-Maze {self.corridor}, {self.steps} steps",
            "offline": f"{self.dataset}, {self.updates} updates",
        }[kind]
        promise = f"alpha {self.alpha}, delta {self.delta}, {self.episodes} episodes"
        return f"{task}, {self.depths(kind)[name]}, {self.layers} layers, {promise}, seed {seed}"

    def title(self, kind: str) -> str:
        """Of the table of a kind."""
        return f"T-Maze of {self.corridor}" if kind == "online" else self.dataset

    def depths(self, kind: str) -> dict[str, Depth]:
        """By name."""
        confidence: Confidence = "softmax" if kind == "online" else "classifier"
        found: dict[str, Depth] = {
            "Fixed": Fixed(),
            "Universal": Universal(),
            "ACT": ACT(ponder_cost=self.ponder_cost),
            "CALM": CALM(confidence=confidence, exit_coef=self.exit_coef),
        }
        adaptive = DepthAdaptive(by="geometric", penalty=self.penalty, exit_coef=self.exit_coef)
        return found | ({"DepthAdaptive": adaptive} if kind == "offline" else {})

    def train(self, kind: str, name: str, seed: int) -> Run:
        """One training from its first step to its evaluations."""
        makers: dict[str, Callable[[Depth, int], Run]] = {"online": self.online, "offline": self.offline}
        return makers[kind](self.depths(kind)[name], seed)

    def online(self, depth: Depth, seed: int) -> Run:
        """A GTrXLPPO."""
        make = partial(make_vec_env, "rlxf/TMaze-v0", env_kwargs={"corridor_length": self.corridor})
        agent = GTrXLPPO(
            "MlpGTrXLPolicy",
            make(ENVS, seed),
            core=replace(gtrxl(layers=self.layers), depth=depth),
            seed=seed,
            **FEWER_UPDATES,
        )
        agent.learn(self.steps)
        play = partial(evaluate, agent, make(ENVS), self.episodes)
        measure = partial(self.measured, agent, play, partial(make, 1, seed))
        calibrate = partial(
            agent.calibrate, make(ENVS), self.alpha, self.delta, episodes=self.episodes, seed=seed
        )
        return in_both_ways(depth, measure, calibrate)

    def offline(self, depth: Depth, seed: int) -> Run:
        """A Decision Transformer."""
        arguments = SHORT["small"].arguments()
        core = replace(arguments.pop("core"), layers=self.layers, depth=depth)
        agent = DecisionTransformer(self.dataset, core=core, seed=seed, **arguments)
        agent.learn(self.updates)
        target = float(load_trajectories(self.dataset).returns.max())

        def play() -> Report:
            env = agent.make_env(min(50, self.episodes))
            return evaluate(agent, env, self.episodes, target_returns=[target]).first

        measure = partial(self.measured, agent, play, lambda: ReturnToGo(agent.make_env(1, seed), target))
        return in_both_ways(depth, measure, partial(agent.calibrate, self.alpha, self.delta))

    def measured(self, agent: Any, play: Callable[[], Report], make: Callable[[], Any]) -> Measured:
        """How the agent acts as it is."""
        report = play()
        return Measured(*walk(agent, make(), self.timed), report.returns.tolist(), report.lengths.tolist())


def in_both_ways(depth: Depth, measure: Callable[[], Measured], calibrate: Callable[[], Any]) -> Run:
    """What the agent does; for CALM with all passes, then with what `calibrate` found."""
    if not isinstance(depth, CALM):
        return Run({"": measure()})
    ways = {", all passes": measure()}
    threshold = calibrate().threshold
    return Run(ways | {", calibrated": measure()}, threshold)


def walk(agent: Any, env: Any, steps: int) -> tuple[float, float]:
    """Passes, and milliseconds of processor time, that a step of one environment takes on average."""
    obs, state, starts = env.reset(), None, np.ones(1, bool)
    passes_so_far(agent)
    taken, seconds = [], 0.0
    for _ in range(steps):
        start = time.process_time()
        actions, state = agent.predict(obs, state, starts, deterministic=True)
        seconds += time.process_time() - start
        taken.append(passes_so_far(agent))
        obs, _, starts, _ = env.step(actions)
    return mean(taken), 1000 * seconds / steps


def passes_so_far(agent: Any) -> float:
    """Passes that tokens took on average since last asked, or in the last forward; else all of them."""
    transformer = agent.policy.transformer
    for depth in (transformer.acting_depth(), transformer.mean_depth()):
        if depth is not None:
            return float(depth)
    return float(transformer.spec.layers)


def as_run(answer: dict[str, Any]) -> Run:
    """What JSON told."""
    return Run({name: Measured(**way) for name, way in answer["ways"].items()}, answer["threshold"])


def by_way(runs: dict[tuple[str, int], Run]) -> dict[str, dict[int, Measured]]:
    """By depth and way of acting, then by seed."""
    found: dict[str, dict[int, Measured]] = {}
    for (depth, seed), run in runs.items():
        for way, measured in run.ways.items():
            found.setdefault(depth + way, {})[seed] = measured
    return found


def reports(runs: dict[tuple[str, int], Run]) -> dict[str, Report]:
    """The episodes of all seeds of each depth, and of each seed."""
    found = {}
    for name, own in by_way(runs).items():
        found[f"{name}, {len(own)} seeds"] = as_report(list(own.values()))
        found |= {f"  {name}, seed {seed}": as_report([measured]) for seed, measured in own.items()}
    return found


def as_report(measured: list[Measured]) -> Report:
    """All their episodes in one."""
    returns, lengths = (
        np.concatenate([getattr(one, what) for one in measured]) for what in ("returns", "lengths")
    )
    return Report(returns, lengths)


def savings(runs: dict[tuple[str, int], Run]) -> Table:
    """Passes and time of a step, and the thresholds that were found."""
    table = Table(
        "depth", "passes", "of each seed", "ms a step", "thresholds", title="a step of one environment"
    )
    for name, own in by_way(runs).items():
        passes = [measured.passes for measured in own.values()]
        thresholds = [run.threshold for (depth, _), run in runs.items() if name == f"{depth}, calibrated"]
        table.add_row(
            name,
            f"{mean(passes):.2f}",
            ", ".join(f"{each:.2f}" for each in passes),
            f"{mean(measured.milliseconds for measured in own.values()):.2f}",
            ", ".join(f"{threshold:g}" for threshold in thresholds),
        )
    return table
