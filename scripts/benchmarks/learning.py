"""Learning speed and reliability of agents on the T-Maze."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from benchmarks.gtrxl_agents import FEWER_UPDATES
from benchmarks.mixers import core_of
from benchmarks.result_cache import SOLVED, SuccessCurve, check_names, run_missing
from benchmarks.techniques import learn_with_each
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.attention.registry import TECHNIQUES
from rlxf.envs.make import make_vec_env
from rlxf.evaluation import EvaluationCallback

ENVS = 32


@dataclass(frozen=True)
class Corridor:
    """T-Maze with its training settings.

    Args:
        steps: environment steps of training.
        options: changes of GTrXLPPO's defaults. The memory must span the corridor.
        recurrent_options: the same for cores with recurrent mixers.
        recurrent_envs: number of environments for cores with recurrent mixers.
        task: changes of the T-Maze's defaults.
        prepare: wrapper of the training environments.
    """

    steps: int
    options: dict[str, Any] = field(default_factory=dict)
    recurrent_options: dict[str, Any] = field(default_factory=dict)
    recurrent_envs: int = ENVS
    task: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[VecEnv], VecEnv] = lambda env: env

    def environments(self, length: int, seed: int | None = None, number: int = ENVS) -> VecEnv:
        """Create T-Mazes with a corridor of this length."""
        kwargs = {"corridor_length": length, **self.task}
        return make_vec_env("rlxf/TMaze-v0", number, seed, env_kwargs=kwargs)

    def with_learning_rate(self, rate: float | None) -> "Corridor":
        """Return these settings with a constant learning rate of GTrXLPPO; None: these settings."""
        if rate is None:
            return self
        changed = {"learning_rate": rate}
        recurrent = self.recurrent_options | changed
        return replace(self, options=self.options | changed, recurrent_options=recurrent)


TASK = {"penalty_rule": "step", "penalty": -0.05}
"""Task options of long corridors. With the penalty of the paper, only the few steps before the first mistake
have a learning signal, 1 / L per step, and only if the error of the critic is smaller: too slow here."""
LONG = partial(Corridor, task=TASK, prepare=partial(VecNormalize, norm_reward=False))
"""Long corridors use normalized observations. The junction occurs once in L + 1 steps; normalization
amplifies it, otherwise the agent behaves there as in the corridor and rarely tries an arm."""


def memory_of(length: int) -> dict[str, Any]:
    """Return the options of a core with attention: all environments are synchronous, and a rollout as long as
    an episode contains the junction in every update."""
    return {"memory_length": length, "n_steps": length}


def segments_of(length: int) -> dict[str, Any]:
    """Return the options of a core with recurrent mixers, whose gradients stop at the start of a segment.

    A segment twice as long as an episode contains a whole one, whatever the step at which it begins. The
    learning rate stays constant, since the mixer begins to use its state only after the agent walks to the
    junction without mistakes, late in training.
    """
    return {"n_steps": length, "segment_length": length, "batch_size": length, "learning_rate": 3e-4}


CORRIDORS = {
    50: Corridor(200_000),
    100: Corridor(300_000),
    250: LONG(600_000, memory_of(256), segments_of(512)),
    1000: LONG(2_000_000, memory_of(1024), segments_of(2048), 16),
}


@dataclass(frozen=True)
class Run(SuccessCurve):
    """Result of one training run.

    Args:
        program: name of the agent.
        corridor: length of the corridor.
        seed: random seed.
        curve: (environment steps, success rate) of each evaluation.
        seconds: CPU time of the run, with its evaluations.
        learning_rate: constant learning rate; None for that of the corridor's settings.
    """

    program: str
    corridor: int
    seed: int
    curve: list[tuple[int, float]]
    seconds: float
    learning_rate: float | None = None

    @property
    def lowest_after(self) -> float | None:
        """Lowest success rate from `solved_at` on."""
        solved = self.solved_at
        return None if solved is None else min(success for step, success in self.curve if step >= solved)


@dataclass
class Learning:
    """Success of GTrXLPPO and RecurrentPPO over equal environment steps of the T-Maze.

    With --techniques: success and cost of each technique in a corridor of 50.
    """

    corridors: tuple[int, ...] = (50, 100, 250)
    """Corridor lengths; allowed: 50, 100, 250 and 1000."""
    seeds: int = 5
    """Seeds of GTrXLPPO for each corridor."""
    recurrent_seeds: int = 1
    """Seeds of RecurrentPPO for each corridor."""
    recurrences: tuple[str, ...] = ()
    """Instead of the default agents: GTrXLPPO with each of these recurrent mixers in place of attention."""
    learning_rate: float | None = None
    """Constant learning rate of GTrXLPPO; default: that of the corridor's settings."""
    evaluations: int = 40
    """Evenly spaced evaluations of each run."""
    episodes: int = 200
    """Episodes per evaluation."""
    processes: int = 2
    """Parallel processes, with one thread each."""
    techniques: bool = False
    """Instead of corridors: train each technique in a corridor of 50, for 150,000 steps with 2 seeds."""
    only: tuple[str, ...] = ()
    """With --techniques: names of the techniques, in addition to the default core; default: all."""
    output: Path = Path("runs/bench-learning.jsonl")
    """Output file with a line for each run; completed runs are not repeated. The figure of the curves is
    saved next to it."""

    def __post_init__(self) -> None:
        recurrences = self.recurrences, TECHNIQUES["recurrence"]
        check_names(corridors=(self.corridors, CORRIDORS), recurrences=recurrences)

    def run(self) -> None:
        """Make missing runs, print the table, and plot the curves."""
        if self.techniques:
            learn_with_each(self.only, self.processes, self.output)
            return
        runs = [Run(**run) for run in run_missing(self.jobs(), self.processes, self.output).values()]
        Console(width=120).print(table(runs))
        draw(runs, self.output.with_suffix(".png"))
        Console().print(f"curves: {self.output}, {self.output.with_suffix('.png')}")

    def jobs(self) -> dict[str, Callable[[], Run]]:
        """Return the runs by their keys in the output file."""
        size = f"{self.evaluations} evaluations of {self.episodes} episodes"
        rate = "" if self.learning_rate is None else f", learning rate {self.learning_rate:g}"
        return {
            f"{program}, corridor {corridor}, seed {seed}, {size}{rate}": partial(
                train, program, corridor, seed, self.evaluations, self.episodes, self.learning_rate
            )
            for corridor in self.corridors
            for program, seeds in self._seeds_of_programs().items()
            for seed in range(seeds)
        }

    def _seeds_of_programs(self) -> dict[str, int]:
        """Return the number of seeds of each program."""
        if self.recurrences:
            return dict.fromkeys(self.recurrences, self.seeds)
        return {"GTrXLPPO": self.seeds, "RecurrentPPO": self.recurrent_seeds}


def train(
    program: str, corridor: int, seed: int, evaluations: int, episodes: int, learning_rate: float | None
) -> Run:
    """Train one agent."""
    setting = CORRIDORS[corridor].with_learning_rate(learning_rate)
    callback = EvaluationCallback(
        setting.environments(corridor), episodes=episodes, every_steps=setting.steps // evaluations
    )
    start = time.process_time()
    agent(program, setting, corridor, seed).learn(setting.steps, callback=callback)
    curve = [(step, report.success_rate or 0.0) for step, report in callback.reports.items()]
    return Run(program, corridor, seed, curve, time.process_time() - start, learning_rate)


def agent(program: str, setting: Corridor, corridor: int, seed: int) -> OnPolicyAlgorithm:
    """Build an agent with its environments.

    Both have default settings, except for the options of the corridor. GTrXLPPO makes fewer updates, and
    RecurrentPPO has 64 hidden units. Other names are recurrent mixers of GTrXLPPO.
    """
    if program in TECHNIQUES["recurrence"]:
        env = setting.prepare(setting.environments(corridor, seed, setting.recurrent_envs))
        options = FEWER_UPDATES | setting.recurrent_options | {"core": core_of(program)}
        return GTrXLPPO("MlpGTrXLPolicy", env, seed=seed, **options)
    env = setting.prepare(setting.environments(corridor, seed))
    if program == "GTrXLPPO":
        return GTrXLPPO("MlpGTrXLPolicy", env, seed=seed, **(FEWER_UPDATES | setting.options))
    return RecurrentPPO("MlpLstmPolicy", env, seed=seed, policy_kwargs={"lstm_hidden_size": 64})


def table(runs: list[Run]) -> Table:
    """Return a table with a row for each run."""
    columns = (
        "corridor",
        "program",
        "seed",
        "solved at",
        "lowest after",
        "last",
        "of steps",
        "CPU, s",
        "not default",
    )
    result = Table(*columns, title=f"T-Maze, solved: success of at least {SOLVED}")
    for run in runs:
        result.add_row(*cells(run))
    return result


def cells(run: Run) -> list[str]:
    """Return the cells of a run."""
    corridor = CORRIDORS[run.corridor].with_learning_rate(run.learning_rate)
    recurrent = run.program in TECHNIQUES["recurrence"]
    options = corridor.recurrent_options if recurrent else corridor.options
    return [
        str(run.corridor),
        run.program,
        str(run.seed),
        "" if run.solved_at is None else f"{run.solved_at:,}",
        "" if run.lowest_after is None else f"{run.lowest_after:.3f}",
        f"{run.curve[-1][1]:.3f}",
        f"{corridor.steps:,}",
        f"{run.seconds:.0f}",
        ", ".join(f"{name}={value}" for name, value in (corridor.task | options).items()),
    ]


def draw(runs: list[Run], path: Path) -> None:
    """Plot success over steps, with a panel for each corridor and a line for each run."""
    corridors = sorted({run.corridor for run in runs})
    size = (5 * len(corridors), 3.5)
    figure, axes = plt.subplots(1, len(corridors), figsize=size, squeeze=False, sharey=True)
    for axis, corridor in zip(axes[0], corridors, strict=True):
        draw_corridor(axis, [run for run in runs if run.corridor == corridor])
        axis.set(title=f"corridor {corridor}", xlabel="environment steps, thousands", ylim=(-0.03, 1.03))
    axes[0, 0].set_ylabel("success rate")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def draw_corridor(axis: Any, runs: list[Run]) -> None:
    """Plot the runs of one corridor; each program has one legend entry."""
    programs = ("GTrXLPPO", "RecurrentPPO", *TECHNIQUES["recurrence"])
    colors = {program: f"C{number}" for number, program in enumerate(programs)}
    for run in runs:
        label = run.program if run.seed == 0 else None
        steps, successes = zip(*((step / 1000, success) for step, success in run.curve), strict=True)
        axis.plot(steps, successes, color=colors[run.program], alpha=0.7, label=label)
