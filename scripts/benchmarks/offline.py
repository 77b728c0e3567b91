"""Decision Transformer: seconds of an update, steps of an evaluation, memory; beside HF's model."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import hugging_face
from benchmarks.acting import seconds
from benchmarks.machine import machine
from benchmarks.offline_memory import Memory, memory_of_training
from benchmarks.offline_setting import SETTINGS, Setting
from benchmarks.operations import matrix_rate
from benchmarks.update_clock import UpdateClock
from rlxf import DecisionTransformer, evaluate
from rlxf.envs.trajectories import Windows, load_trajectories

LARGE = (
    "rlxf/hopper/medium-v0",
    "rlxf/hopper/medium-replay-like-v0",
    "rlxf/hopper/medium-expert-v0",
    "rlxf/hopper/expert-v0",
    "rlxf/hopper/medium-v0",
)
"""Five sets of 200,000 steps: 1,000,000 and more."""


@dataclass(frozen=True)
class Program:
    """What one of the two showed.

    Args:
        update_seconds: of each update, all rounds together.
        steps: environment steps of the episodes that were evaluated.
        seconds: that the evaluation took.
    """

    update_seconds: list[float]
    steps: int
    seconds: float

    @property
    def update(self) -> float:
        """Typical seconds of an update: the median, which other programs on the machine disturb the least."""
        return median(self.update_seconds)

    @property
    def rate(self) -> float:
        """Environment steps per second of the evaluation."""
        return self.steps / self.seconds


@dataclass
class Offline:
    """Decision Transformer beside HF's model in the original training loop: one run, equal sizes.

    Both train in turns, then each evaluates what it learned: ours in 50 environments side by side, the
    original in one. Also what reading the data costs, and the memory that 1,000,000 steps of data take.
    Datasets are read from MINARI_DATASETS_PATH; Hopper needs the extra mujoco. For numbers that count, leave
    the machine alone.
    """

    dataset: str = "rlxf/hopper/medium-v0"
    """Minari id; vector observations, Box actions."""
    setting: str = "published"
    """Sizes: published (width 128, 3 layers) or small (width 64, 2 layers)."""
    updates: int = 200
    """Updates of each program in each round; the first tenth warms up."""
    rounds: int = 3
    """Rounds: the programs take turns, so that both meet the same disturbances."""
    episodes: int = 50
    """Episodes of the evaluation, by the agents of the last round."""
    large: tuple[str, ...] = LARGE
    """Datasets joined to measure memory."""
    venv: Path = hugging_face.CACHE
    """Where to make the environment for HF's model."""
    output: Path = Path("runs/bench-offline.json")
    """Where to write all numbers."""

    def __post_init__(self) -> None:
        if self.setting not in SETTINGS:
            raise ValueError(f"setting must be one of {', '.join(SETTINGS)}, got {self.setting!r}")

    def run(self) -> None:
        """Measure, print the table, write the numbers."""
        hugging_face.install(self.venv)
        setting = SETTINGS[self.setting]
        before = matrix_rate()
        programs = self.measure(setting)
        rate = max(before, matrix_rate())
        memory = memory_of_training(self.large, setting)
        batch = batch_seconds(self.dataset, setting)
        console = Console(width=120)
        console.print(speed_table(programs, setting, rate))
        console.print(facts_table(programs, batch, memory))
        self.write(programs, rate, batch, memory)
        console.print(f"numbers: {self.output}")

    def measure(self, setting: Setting) -> dict[str, Program]:
        """Both programs, taking turns."""
        rounds = [(self.theirs(setting, number), self.ours(setting, number)) for number in range(self.rounds)]
        theirs, ours = zip(*rounds, strict=True)
        return {"HF, original loop": joined(theirs), "DecisionTransformer": joined(ours)}

    def theirs(self, setting: Setting, number: int) -> Program:
        """A round of HF's model."""
        answer = hugging_face.call(
            self.venv,
            "time_original",
            setting,
            dataset=self.dataset,
            updates=self.updates,
            seed=number,
            episodes=self.evaluated(number),
            target=self.target,
        )
        return Program(warmed(answer["update_seconds"]), answer["steps"], answer["seconds"])

    def ours(self, setting: Setting, number: int) -> Program:
        """A round of ours."""
        agent, clock = DecisionTransformer(self.dataset, seed=number, **setting.arguments()), UpdateClock()
        agent.learn(self.updates, clock)
        took = warmed(clock.took)
        if not self.evaluated(number):
            return Program(took, 0, 0.0)
        env, start = agent.make_env(self.episodes), time.perf_counter()
        report = evaluate(agent, env, self.episodes, target_returns=[self.target]).first
        elapsed = time.perf_counter() - start
        env.close()
        return Program(took, int(report.lengths.sum()), elapsed)

    def evaluated(self, number: int) -> int:
        """Episodes to evaluate in this round."""
        return self.episodes if number == self.rounds - 1 else 0

    @property
    def target(self) -> float:
        """Return that is asked for: the highest in the data."""
        return float(load_trajectories(self.dataset).returns.max())

    def write(self, programs: dict[str, Program], rate: float, batch: float, memory: Memory) -> None:
        """All numbers as JSON."""
        found = {
            "machine": machine(),
            "matrix_rate": rate,
            "options": {**asdict(self), "venv": str(self.venv), "output": str(self.output)},
            "programs": {name: asdict(program) for name, program in programs.items()},
            "batch_seconds": batch,
            "memory": asdict(memory),
        }
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(found, indent=1))


def warmed(took: list[float]) -> list[float]:
    """Without the first tenth."""
    return took[len(took) // 10 :]


def joined(rounds: Sequence[Program]) -> Program:
    """The rounds of one program as one."""
    took = [update for program in rounds for update in program.update_seconds]
    return Program(took, sum(p.steps for p in rounds), sum(p.seconds for p in rounds))


def batch_seconds(dataset: str, setting: Setting) -> float:
    """Seconds of reading one batch of windows: the median of 1,000."""
    windows = Windows(load_trajectories(dataset), setting.context_length)
    return median(seconds(partial(windows.sample, setting.batch_size)) for _ in range(1000))


def speed_table(programs: dict[str, Program], setting: Setting, rate: float) -> Table:
    """A line for each program, and how much faster ours is."""
    floor = 2 * setting.multiply_adds() / rate
    title = (
        f"{setting}, {rate / 1e9:.0f} GFLOP/s, {torch.get_num_threads()} threads; floor {1000 * floor:.0f} ms"
    )
    table = Table(
        "program", "ms an update", "at most 10% took", "evaluation, steps/s", "episode steps", title=title
    )
    for name, program in programs.items():
        slow = sorted(program.update_seconds)[-len(program.update_seconds) // 10]
        cells = (1000 * program.update, 1000 * slow, program.rate)
        table.add_row(name, *(f"{value:.1f}" for value in cells), f"{program.steps:,}")
    theirs, ours = programs.values()
    table.add_row("times faster", f"{theirs.update / ours.update:.2f}", "", f"{ours.rate / theirs.rate:.1f}")
    return table


def facts_table(programs: dict[str, Program], batch: float, memory: Memory) -> Table:
    """Data loading and memory of ours."""
    ours = programs["DecisionTransformer"]
    table = Table(title="DecisionTransformer", show_header=False)
    share = f"{batch / ours.update:.2%} of an update"
    table.add_row("reading a batch", f"{1000 * batch:.2f} ms, {share}")
    table.add_row("data", f"{memory.steps:,} steps, {memory.file_bytes / 1e6:.0f} MB, memory-mapped")
    table.add_row("peak of the process that converts them and trains", f"{memory.peak_bytes / 1e6:.0f} MB")
    return table
