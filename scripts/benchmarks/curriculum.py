"""T-Maze with a curriculum: GTrXLPPO in corridors that grow during the training."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from stable_baselines3.common.vec_env import VecEnv

from benchmarks.mixers import core_of
from benchmarks.result_cache import SOLVED, run_missing
from rlxf import GTrXLPPO, TransformerSpec, evaluate
from rlxf.attention.registry import TECHNIQUES
from rlxf.envs import make_vec_env
from rlxf.envs.tmaze import PenaltyRule
from rlxf.evaluation import EvaluationCallback

N_ENVS = 32
"""Mean return of an evaluation at which a stage ends, and the threshold of solved stages."""
COLUMNS = ("corridor", "mean return of each seed", "solved: median and most steps")


@dataclass(frozen=True)
class Stage:
    """Result of a stage of a training.

    Args:
        corridor: length of the corridor.
        steps: environment steps of this and all earlier stages.
        mean_return: mean return of the evaluation at the end of the stage.
    """

    corridor: int
    steps: int
    mean_return: float


@dataclass(frozen=True)
class Run:
    """Result of one training.

    Args:
        seed: random seed.
        stages: the stages as JSON values of `Stage`; those after a stage that was not solved are missing.
    """

    seed: int
    stages: list[dict[str, float]]


@dataclass
class Curriculum:
    """GTrXLPPO in the active or passive T-Maze, first in short corridors, then in longer ones.

    A stage ends once an evaluation of 20 episodes has a mean return of 0.95. The next one continues with the
    weights and the state of the optimizer; the schedules of the learning rate and of the entropy begin again,
    and would end after --stage-steps. A stage is solved if the mean return of 100 other episodes is at least
    0.95; otherwise the training ends. All settings but the core are the defaults of GTrXLPPO. In the active
    task without short corridors, the agent walks to the junction without the hint.

    Completed trainings are lines of the output file and are not repeated.
    """

    corridors: tuple[int, ...] = (2, 5, 10, 20, 50, 100)
    """Length of the corridor in each stage."""
    active: bool = True
    """Start one step east of the hint, which the agent must fetch, instead of on it."""
    recurrence: str | None = None
    """Recurrence of the core, such as DeltaNet; None for the Gated Transformer-XL with a memory of 128."""
    penalty_rule: PenaltyRule = "step"
    """Steps with a penalty: "schedule" as in Memory-RL, or "step"."""
    stage_steps: int = 300_000
    """Most environment steps of a stage."""
    every_steps: int = 10_000
    """Environment steps between evaluations."""
    seeds: int = 5
    """Number of trainings."""
    processes: int = 1
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-curriculum.jsonl")
    """Output file with a line for each training."""

    def __post_init__(self) -> None:
        if self.recurrence not in (None, *TECHNIQUES["recurrence"]):
            known = ", ".join(TECHNIQUES["recurrence"])
            raise ValueError(f"recurrence must be None or among {known}, got {self.recurrence!r}")

    def run(self) -> None:
        """Make missing trainings, write each result, and print the table."""
        jobs: dict[str, Callable[[], Run]] = {
            self.key(seed): partial(self.learn, seed) for seed in range(self.seeds)
        }
        runs = [Run(**run) for run in run_missing(jobs, self.processes, self.output).values()]
        Console(width=120).print(self.table(runs), f"numbers: {self.output}")

    def key(self, seed: int) -> str:
        """Return the key of a training in the output file."""
        corridors = ", ".join(map(str, self.corridors))
        limits = f"at most {self.stage_steps} steps each, evaluated every {self.every_steps}"
        task = f"{self.task}, corridors of {corridors}, penalty {self.penalty_rule}"
        return f"{task}, {self.recurrence or 'attention'}, {limits}, seed {seed}"

    @property
    def task(self) -> str:
        """Gymnasium id of the environment."""
        return "rlxf/TMazeActive-v0" if self.active else "rlxf/TMaze-v0"

    def learn(self, seed: int) -> Run:
        """Train an agent through all stages."""
        agent: GTrXLPPO | None = None
        stages: list[Stage] = []
        for number, corridor in enumerate(self.corridors):
            envs = self.make(corridor, seed + 1000 * number)
            longer = GTrXLPPO("MlpGTrXLPolicy", envs, core=self.core, seed=seed, device="cpu")
            if agent is not None:
                longer.set_parameters(agent.get_parameters())
            stop = EvaluationCallback(self.make(corridor), 20, self.every_steps, stop_return=SOLVED)
            agent = longer.learn(self.stage_steps, stop)
            report = evaluate(agent, self.make(corridor), 100, seed=0)
            before = stages[-1].steps if stages else 0
            stages.append(Stage(corridor, before + agent.num_timesteps, report.mean))
            if stages[-1].mean_return < SOLVED:
                break
        return Run(seed, [vars(stage) for stage in stages])

    @property
    def core(self) -> TransformerSpec | None:
        """Core of the agent; None for the default."""
        return None if self.recurrence is None else core_of(self.recurrence)

    def make(self, corridor: int, seed: int | None = None) -> VecEnv:
        """Make the environments of a stage."""
        kwargs = {"corridor_length": corridor, "penalty_rule": self.penalty_rule}
        return make_vec_env(self.task, N_ENVS, seed=seed, env_kwargs=kwargs)

    def table(self, runs: list[Run]) -> Table:
        """Return the table of results: a row for each stage."""
        core = self.recurrence or "attention"
        table = Table(*COLUMNS, title=f"{self.task}, {core}, penalty {self.penalty_rule}")
        for corridor in self.corridors:
            returns = [f"{stage['mean_return']:.2f}" for stage in stages_of(runs, corridor)]
            table.add_row(str(corridor), ", ".join(returns), cell(runs, corridor))
        return table


def stages_of(runs: list[Run], corridor: int) -> list[dict[str, float]]:
    """Return the stages with this corridor."""
    return [stage for run in runs for stage in run.stages if stage["corridor"] == corridor]


def cell(runs: list[Run], corridor: int) -> str:
    """Return how many trainings solved a corridor, and the median and the maximum of their steps."""
    steps = [int(each["steps"]) for each in stages_of(runs, corridor) if each["mean_return"] >= SOLVED]
    solved = f"{len(steps)} of {len(runs)}"
    return f"{solved}: {median(steps):,.0f}, {max(steps):,}" if steps else solved
