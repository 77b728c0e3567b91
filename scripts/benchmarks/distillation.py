"""Return and speed of distilled students with a quarter of the parameters of their teachers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.acting import seconds
from benchmarks.gtrxl_agents import FEWER_UPDATES
from benchmarks.offline_setting import SHORT
from benchmarks.result_cache import check_names, run_missing
from rlxf import DecisionTransformer, GTrXLPPO, evaluate
from rlxf.agents.gtrxl import gtrxl
from rlxf.data import load_trajectories
from rlxf.envs.make import make_vec_env
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.evaluation import Report, compare

WALK = 60
"""Steps of an episode before steps are timed."""
CALLS = 300
"""Number of timed calls; teacher and student alternate."""


@dataclass(frozen=True)
class Pair:
    """Result of one teacher and its student.

    Args:
        task: name of the task.
        seed: random seed.
        parameters: number of parameters of both.
        milliseconds: median time per step of one environment.
        returns: returns of the evaluation episodes of both.
        lengths: lengths of these episodes, in steps.
    """

    task: str
    seed: int
    parameters: dict[str, int]
    milliseconds: dict[str, float]
    returns: dict[str, list[float]]
    lengths: dict[str, list[int]]


@dataclass
class Distillation:
    """Parameters, returns with intervals, and milliseconds per step of teachers and students.

    A Decision Transformer on a Minari dataset, read from MINARI_DATASETS_PATH, and a GTrXLPPO on a T-Maze.
    Hopper requires the extra mujoco. Each student is trained for as many updates or steps as its teacher.
    Completed pairs are lines of the output file and are not repeated.
    """

    kinds: tuple[str, ...] = ("offline", "online")
    """Kinds of agents: offline (Decision Transformer) and online (GTrXLPPO)."""
    dataset: str = "rlxf/hopper/medium-v0"
    """Minari id."""
    widths: tuple[int, int] = (128, 96)
    """Features per token of teacher and student."""
    layers: tuple[int, int] = (4, 1)
    """Layers of both. Fewer layers make steps faster; narrower layers hardly do so on a CPU."""
    updates: int = 10_000
    """Updates of each Decision Transformer, teacher and student."""
    corridor: int = 50
    """Length of the T-Maze's corridor."""
    steps: int = 200_000
    """Environment steps of each GTrXLPPO, teacher and student."""
    seeds: int = 3
    """Pairs of each kind."""
    episodes: int = 100
    """Episodes of an evaluation."""
    processes: int = 1
    """Parallel processes, with one thread each. More than one makes times less reliable."""
    output: Path = Path("runs/bench-distillation.jsonl")
    """Output file with a line for each pair."""

    def __post_init__(self) -> None:
        check_names(kinds=(self.kinds, ("offline", "online")))

    def run(self) -> None:
        """Train and evaluate missing pairs, write each result, and print the tables."""
        makers: dict[str, Callable[[int], Pair]] = {"offline": self.offline, "online": self.online}
        jobs: dict[str, Callable[[], Pair]] = {
            self.key(kind, seed): partial(makers[kind], seed)
            for kind in self.kinds
            for seed in range(self.seeds)
        }
        pairs = [Pair(**pair) for pair in run_missing(jobs, self.processes, self.output).values()]
        console = Console(width=120)
        for task in dict.fromkeys(pair.task for pair in pairs):
            own = [pair for pair in pairs if pair.task == task]
            console.print(returns_table(own), speed_table(own))
        console.print(f"numbers: {self.output}")

    def key(self, kind: str, seed: int) -> str:
        """Return the key of a pair in the output file."""
        task = {
            "offline": f"{self.dataset}, {self.updates} updates",
            "online": f"T-Maze {self.corridor}, {self.steps} steps",
        }[kind]
        return f"{task}, widths {self.widths}, layers {self.layers}, {self.episodes} episodes, seed {seed}"

    def offline(self, seed: int) -> Pair:
        """Train a teacher on the data, and a student by distillation."""
        teacher, student = (
            DecisionTransformer(
                self.dataset, seed=seed, **replace(SHORT["small"], width=width, layers=layers).arguments()
            )
            for width, layers in zip(self.widths, self.layers, strict=True)
        )
        teacher.learn(self.updates)
        student.distill(teacher, self.updates)
        target = float(load_trajectories(self.dataset).returns.max())

        def play(agent: Any) -> Report:
            env = agent.make_env(min(50, self.episodes))
            return evaluate(agent, env, self.episodes, target_returns=[target]).first

        timing_env = ReturnToGo(teacher.make_env(1, seed), target)
        return compared(self.dataset, seed, {"teacher": teacher, "student": student}, play, timing_env)

    def online(self, seed: int) -> Pair:
        """Train a teacher on rewards, and a student by distillation."""
        task = {"corridor_length": self.corridor}
        cores = [gtrxl(width=w, layers=n) for w, n in zip(self.widths, self.layers, strict=True)]
        teacher, student = (
            GTrXLPPO(
                "MlpGTrXLPolicy",
                make_vec_env("rlxf/TMaze-v0", 32, seed, env_kwargs=task),
                core=core,
                seed=seed,
                **FEWER_UPDATES,
            )
            for core in cores
        )
        teacher.learn(self.steps)
        student.distill(teacher, self.steps)

        def play(agent: Any) -> Report:
            env = make_vec_env("rlxf/TMaze-v0", min(32, self.episodes), env_kwargs=task)
            return evaluate(agent, env, self.episodes)

        timing_env = make_vec_env("rlxf/TMaze-v0", 1, seed, env_kwargs=task)
        name = f"T-Maze, corridor {self.corridor}"
        return compared(name, seed, {"teacher": teacher, "student": student}, play, timing_env)


def compared(task: str, seed: int, agents: dict[str, Any], play: Callable[[Any], Report], env: Any) -> Pair:
    """Measure parameters, step time and returns of both agents."""
    reports = {name: play(agent) for name, agent in agents.items()}
    return Pair(
        task,
        seed,
        {name: sum(p.numel() for p in agent.policy.parameters()) for name, agent in agents.items()},
        milliseconds(agents, env),
        {name: report.returns.tolist() for name, report in reports.items()},
        {name: report.lengths.tolist() for name, report in reports.items()},
    )


def milliseconds(agents: dict[str, Any], env: Any) -> dict[str, float]:
    """Return the median time per step of one environment in an episode; the agents alternate."""
    calls = {name: step_in_episode(agent, env) for name, agent in agents.items()}
    times: dict[str, list[float]] = {name: [] for name in agents}
    for _ in range(CALLS):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return {name: 1000 * median(values) for name, values in times.items()}


def step_in_episode(agent: Any, env: Any) -> Callable[[], object]:
    """Return a function that predicts the next step of the agent, after `WALK` steps of an episode."""
    obs, state, starts = env.reset(), None, np.ones(1, bool)
    for _ in range(WALK):
        actions, state = agent.predict(obs, state, starts)
        obs, _, starts, _ = env.step(actions)
    return partial(agent.predict, obs, state, starts)


def returns_table(pairs: list[Pair]) -> Table:
    """Return the table of returns of teachers and students, over all seeds and by seed."""
    rows: dict[str, Report] = {}
    for name in ("teacher", "student"):
        returns, lengths = (
            np.concatenate([getattr(pair, what)[name] for pair in pairs]) for what in ("returns", "lengths")
        )
        rows[f"{name}, {len(pairs)} seeds"] = Report(returns, lengths)
        for pair in pairs:
            rows[f"  {name}, seed {pair.seed}"] = Report(
                np.array(pair.returns[name]), np.array(pair.lengths[name])
            )
    return compare(rows, pairs[0].task, "")


def speed_table(pairs: list[Pair]) -> Table:
    """Return the table of return, parameters and step time of each student relative to its teacher."""
    table = Table("seed", "relative return", "parameters", "relative", "ms per step", "speedup")
    for pair in pairs:
        teacher, student = (float(np.mean(pair.returns[name])) for name in ("teacher", "student"))
        parameters, times = pair.parameters, pair.milliseconds
        table.add_row(
            str(pair.seed),
            f"{student / teacher:.1%}",
            f"{parameters['student']:,}",
            f"{parameters['student'] / parameters['teacher']:.1%}",
            f"{times['student']:.2f}",
            f"{times['teacher'] / times['student']:.2f}",
        )
    return table
