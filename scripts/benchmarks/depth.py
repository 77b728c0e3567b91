"""Layer passes, step time and returns of adaptive depth, and validity of its risk guarantee."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.gtrxl_agents import FEWER_UPDATES
from benchmarks.offline_setting import SHORT
from benchmarks.result_cache import check_names, run_missing
from benchmarks.risk_control import violations_table
from rlxf import DecisionTransformer, evaluate
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.agents.gtrxl.core import gtrxl
from rlxf.attention import ACT, CALM, DepthAdaptive, Fixed, Universal
from rlxf.attention.depth.base import Depth
from rlxf.attention.depth.calm import Confidence
from rlxf.data import load_trajectories
from rlxf.envs.make import make_vec_env
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.evaluation import Report, compare

ENVS = 32


@dataclass(frozen=True)
class Measured:
    """Measurement of one agent.

    Args:
        passes: mean number of layer passes per step of one environment.
        milliseconds: mean CPU time per step.
        returns: returns of the evaluation episodes.
        lengths: lengths of these episodes, in steps.
    """

    passes: float
    milliseconds: float
    returns: list[float]
    lengths: list[int]


@dataclass(frozen=True)
class Run:
    """Result of one training run.

    Args:
        ways: measurements by name: for CALM with all passes and calibrated; otherwise a single unnamed one.
        threshold: calibrated confidence threshold of CALM, infinite if none is valid; None for others.
    """

    ways: dict[str, Measured]
    threshold: float | None = None


@dataclass
class DepthBench:
    """Layer passes, returns with intervals and step time of the same agent with several kinds of depth.

    GTrXLPPO on a T-Maze: Fixed; Universal, which repeats one layer; ACT, which is Universal with learned
    halting; CALM with softmax confidence. A Decision Transformer on a Minari dataset, read from
    MINARI_DATASETS_PATH: the same and DepthAdaptive. Hopper requires the extra mujoco; its actions are
    continuous, so CALM uses a classifier. Agents with CALM are evaluated with all passes and with the
    threshold from `calibrate`. The online calibration plays new episodes. The offline one uses training
    data, which makes its guarantee weaker.

    Finally, calibrations are simulated to count violations of the guarantee. Completed runs are lines of the
    output file and are not repeated. Steps are those of a single environment, as in a batch the slowest
    environment determines the time.
    """

    kinds: tuple[str, ...] = ("online", "offline")
    """Kinds of agents: online (GTrXLPPO) and offline (Decision Transformer)."""
    only: tuple[str, ...] = ()
    """Names of the depths; default: all."""
    layers: int = 4
    """Maximum number of passes per token."""
    corridor: int = 50
    """Length of the T-Maze's corridor."""
    steps: int = 200_000
    """Environment steps of each GTrXLPPO."""
    dataset: str = "rlxf/hopper/medium-v0"
    """Minari id."""
    updates: int = 10_000
    """Updates of each Decision Transformer: width 64, the small setting except for its layers."""
    ponder_cost: float = 0.01
    """Cost per pass of ACT."""
    penalty: float = 0.1
    """Penalty per pass of DepthAdaptive."""
    exit_coef: float = 1.0
    """Loss coefficient of the intermediate outputs of CALM and DepthAdaptive; 1 as in their papers."""
    alpha: float = 0.05
    """Guaranteed bound of the mean share of changed actions per episode with CALM."""
    delta: float = 0.05
    """Probability that the guarantee may fail."""
    seeds: int = 3
    """Training runs per depth."""
    episodes: int = 100
    """Episodes per evaluation, and minimum episodes of an online calibration."""
    timed: int = 510
    """Steps of one environment for which passes and time are measured."""
    simulations: int = 200
    """Number of simulated calibrations."""
    processes: int = 1
    """Parallel processes, with one thread each. More than one makes times less reliable."""
    output: Path = Path("runs/bench-depth.jsonl")
    """Output file with a line for each run."""

    def __post_init__(self) -> None:
        check_names(kinds=(self.kinds, ("online", "offline")), only=(self.only, self.depths("offline")))

    def run(self) -> None:
        """Train missing runs, write each result, and print the tables."""
        jobs = {self.key(*job): partial(self.train, *job) for job in self.jobs()}
        results = run_missing(jobs, self.processes, self.output)
        console = Console(width=130)
        for kind in self.kinds:
            runs = {job[1:]: as_run(results[self.key(*job)]) for job in self.jobs() if job[0] == kind}
            console.print(compare(reports(runs), self.title(kind), "depth"), savings(runs))
        console.print(violations_table(self.simulations), f"numbers: {self.output}")

    def jobs(self) -> list[tuple[str, str, int]]:
        """Return kind, depth and seed of each run."""
        return [
            (kind, name, seed)
            for kind in self.kinds
            for seed in range(self.seeds)
            for name in self.depths(kind)
            if name in (self.only or self.depths(kind))
        ]

    def key(self, kind: str, name: str, seed: int) -> str:
        """Return the key of a run in the output file."""
        task = {
            "online": f"T-Maze {self.corridor}, {self.steps} steps",
            "offline": f"{self.dataset}, {self.updates} updates",
        }[kind]
        promise = f"alpha {self.alpha}, delta {self.delta}, {self.episodes} episodes"
        return f"{task}, {self.depths(kind)[name]}, {self.layers} layers, {promise}, seed {seed}"

    def title(self, kind: str) -> str:
        """Return the title of the table of a kind."""
        return f"T-Maze of {self.corridor}" if kind == "online" else self.dataset

    def depths(self, kind: str) -> dict[str, Depth]:
        """Return the depths by name."""
        confidence: Confidence = "softmax" if kind == "online" else "classifier"
        results: dict[str, Depth] = {
            "Fixed": Fixed(),
            "Universal": Universal(),
            "ACT": ACT(ponder_cost=self.ponder_cost),
            "CALM": CALM(confidence=confidence, exit_coef=self.exit_coef),
        }
        adaptive = DepthAdaptive(classifier="geometric", penalty=self.penalty, exit_coef=self.exit_coef)
        return results | ({"DepthAdaptive": adaptive} if kind == "offline" else {})

    def train(self, kind: str, name: str, seed: int) -> Run:
        """Train and evaluate one agent."""
        makers: dict[str, Callable[[Depth, int], Run]] = {"online": self.online, "offline": self.offline}
        return makers[kind](self.depths(kind)[name], seed)

    def online(self, depth: Depth, seed: int) -> Run:
        """Train and measure a GTrXLPPO."""
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
        """Train and measure a Decision Transformer."""
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
        """Measure the agent with its current depth settings."""
        report = play()
        return Measured(
            *measure_steps(agent, make(), self.timed), report.returns.tolist(), report.lengths.tolist()
        )


def in_both_ways(depth: Depth, measure: Callable[[], Measured], calibrate: Callable[[], Any]) -> Run:
    """Measure the agent; for CALM with all passes, then with the calibrated threshold."""
    if not isinstance(depth, CALM):
        return Run({"": measure()})
    ways = {", all passes": measure()}
    threshold = calibrate().threshold
    return Run(ways | {", calibrated": measure()}, threshold)


def measure_steps(agent: Any, env: Any, steps: int) -> tuple[float, float]:
    """Return mean passes and mean milliseconds of CPU time per step of one environment."""
    obs, state, starts = env.reset(), None, np.ones(1, bool)
    passes_so_far(agent)
    passes, seconds = [], 0.0
    for _ in range(steps):
        start = time.process_time()
        actions, state = agent.predict(obs, state, starts, deterministic=True)
        seconds += time.process_time() - start
        passes.append(passes_so_far(agent))
        obs, _, starts, _ = env.step(actions)
    return mean(passes), 1000 * seconds / steps


def passes_so_far(agent: Any) -> float:
    """Return mean passes per token since the last call, or in the last forward pass, or all layers."""
    transformer = agent.policy.transformer
    for depth in (transformer.pop_mean_acting_depth(), transformer.mean_depth()):
        if depth is not None:
            return float(depth)
    return float(transformer.spec.layers)


def as_run(answer: dict[str, Any]) -> Run:
    """Build a run from JSON data."""
    return Run({name: Measured(**way) for name, way in answer["ways"].items()}, answer["threshold"])


def by_way(runs: dict[tuple[str, int], Run]) -> dict[str, dict[int, Measured]]:
    """Group measurements by depth and way of acting, then by seed."""
    results: dict[str, dict[int, Measured]] = {}
    for (depth, seed), run in runs.items():
        for way, measured in run.ways.items():
            results.setdefault(depth + way, {})[seed] = measured
    return results


def reports(runs: dict[tuple[str, int], Run]) -> dict[str, Report]:
    """Return the reports of each depth over all seeds, and of each seed."""
    results = {}
    for name, own in by_way(runs).items():
        results[f"{name}, {len(own)} seeds"] = as_report(list(own.values()))
        results |= {f"  {name}, seed {seed}": as_report([measured]) for seed, measured in own.items()}
    return results


def as_report(measured: Sequence[Any]) -> Report:
    """Pool the episodes of several measurements, which have ``returns`` and ``lengths``, in one report."""
    returns, lengths = (
        np.concatenate([getattr(one, what) for one in measured]) for what in ("returns", "lengths")
    )
    return Report(returns, lengths)


def savings(runs: dict[tuple[str, int], Run]) -> Table:
    """Return the table of passes and time per step, and of calibrated thresholds."""
    table = Table("depth", "passes", "by seed", "ms per step", "thresholds", title="Steps of one environment")
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
