"""Update time, evaluation throughput and memory of the Decision Transformer compared with HF's model."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import hugging_face
from benchmarks.acting import seconds
from benchmarks.machine import is_cuda, machine, now
from benchmarks.offline_memory import Memory, memory_of_training
from benchmarks.offline_setting import SETTINGS, Setting
from benchmarks.operations import matrix_rate
from benchmarks.update_clock import UpdateClock
from rlxf import DecisionTransformer, evaluate
from rlxf.data import Windows, load_trajectories
from rlxf.utils.checks import check_choice

LARGE = (
    "rlxf/hopper/medium-v0",
    "rlxf/hopper/medium-replay-like-v0",
    "rlxf/hopper/medium-expert-v0",
    "rlxf/hopper/expert-v0",
    "rlxf/hopper/medium-v0",
)
"""Five datasets of 200,000 steps each, at least 1,000,000 in total."""


@dataclass(frozen=True)
class Program:
    """Result of one program.

    Args:
        update_seconds: seconds of each update in all rounds.
        steps: environment steps of the evaluation.
        seconds: seconds of the evaluation.
    """

    update_seconds: list[float]
    steps: int
    seconds: float

    @property
    def update(self) -> float:
        """Median seconds per update, which is robust to other programs on the machine."""
        return median(self.update_seconds)

    @property
    def rate(self) -> float:
        """Environment steps per second of the evaluation."""
        return self.steps / self.seconds


@dataclass
class Offline:
    """Decision Transformer compared with HF's model in the original training loop, with equal sizes.

    Both programs train in alternating rounds and are then evaluated: ours in 50 parallel environments, the
    original in one. The benchmark also measures the time of reading data, and the memory of training on
    1,000,000 steps. Datasets are read from MINARI_DATASETS_PATH; Hopper requires the extra mujoco. For
    reliable numbers, run no other programs on the machine. On a GPU, both programs wait for it after each
    update.
    """

    dataset: str = "rlxf/hopper/medium-v0"
    """Minari id; vector observations, Box actions."""
    setting: str = "published"
    """Sizes: published (width 128, 3 layers) or small (width 64, 2 layers)."""
    updates: int = 200
    """Updates per program and round; the first tenth is warm-up."""
    rounds: int = 3
    """Rounds; the programs alternate, so that disturbances affect both equally."""
    episodes: int = 50
    """Evaluation episodes, with the agents of the last round."""
    original_episodes: int | None = None
    """Evaluation episodes of the original loop, which plays one after the other; None: as many as ours."""
    large: tuple[str, ...] = LARGE
    """Datasets that are joined for the measurement of memory; empty: it is left out, as on a GPU."""
    device: str = "cpu"
    """Device of both programs: cpu or cuda."""
    cuda_graphs: bool = True
    """Capture updates of DecisionTransformer on a GPU."""
    venv: Path = hugging_face.CACHE
    """Folder of the virtual environment of HF's model."""
    output: Path = Path("runs/bench-offline.json")
    """Output file."""

    def __post_init__(self) -> None:
        check_choice("setting", self.setting, tuple(SETTINGS))

    def run(self) -> None:
        """Measure, print the tables, and write the numbers."""
        hugging_face.install(self.venv)
        setting = SETTINGS[self.setting]
        before = matrix_rate(self.device)
        programs = self.measure(setting)
        rate = max(before, matrix_rate(self.device))
        measured = self.large and not is_cuda(self.device)
        memory = memory_of_training(self.large, setting) if measured else None
        batch = batch_seconds(self.dataset, setting)
        console = Console(width=120)
        console.print(speed_table(programs, setting, rate))
        console.print(facts_table(programs, batch, memory))
        self.write(programs, rate, batch, memory)
        console.print(f"numbers: {self.output}")

    def measure(self, setting: Setting) -> dict[str, Program]:
        """Measure both programs in alternating rounds."""
        rounds = [(self.theirs(setting, number), self.ours(setting, number)) for number in range(self.rounds)]
        theirs, ours = zip(*rounds, strict=True)
        return {"HF, original loop": joined(theirs), "DecisionTransformer": joined(ours)}

    def theirs(self, setting: Setting, number: int) -> Program:
        """Measure a round of HF's model."""
        answer = hugging_face.run_task(
            self.venv,
            "time_original",
            setting,
            dataset=self.dataset,
            updates=self.updates,
            seed=number,
            episodes=self.evaluated(number, self.original_episodes),
            target=self.target,
            device=self.device,
        )
        return Program(warmed(answer["update_seconds"]), answer["steps"], answer["seconds"])

    def ours(self, setting: Setting, number: int) -> Program:
        """Measure a round of our agent."""
        options: dict[str, Any] = {"device": self.device, "cuda_graphs": self.cuda_graphs}
        agent = DecisionTransformer(self.dataset, seed=number, **options, **setting.arguments())
        clock = UpdateClock(partial(now, self.device))
        agent.learn(self.updates, clock)
        times = warmed(clock.durations)
        if not self.evaluated(number):
            return Program(times, 0, 0.0)
        env, target, start = agent.make_env(self.episodes), self.target, now(self.device)
        report = evaluate(agent, env, self.episodes, target_returns=[target]).first
        elapsed = now(self.device) - start
        env.close()
        return Program(times, int(report.lengths.sum()), elapsed)

    def evaluated(self, number: int, episodes: int | None = None) -> int:
        """Return the number of evaluation episodes in a round: that of the option if it is given, or ours."""
        return (episodes or self.episodes) if number == self.rounds - 1 else 0

    @property
    def target(self) -> float:
        """Target return: the highest return of the data."""
        return float(load_trajectories(self.dataset).returns.max())

    def write(self, programs: dict[str, Program], rate: float, batch: float, memory: Memory | None) -> None:
        """Write all numbers as JSON."""
        results = {
            "machine": machine(),
            "matrix_rate": rate,
            "options": {**asdict(self), "venv": str(self.venv), "output": str(self.output)},
            "programs": {name: asdict(program) for name, program in programs.items()},
            "batch_seconds": batch,
            "memory": memory and asdict(memory),
        }
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(results, indent=1))


def warmed(times: list[float]) -> list[float]:
    """Return the times without the first tenth."""
    return times[len(times) // 10 :]


def joined(rounds: Sequence[Program]) -> Program:
    """Join the rounds of one program."""
    times = [update for program in rounds for update in program.update_seconds]
    return Program(times, sum(p.steps for p in rounds), sum(p.seconds for p in rounds))


def batch_seconds(dataset: str, setting: Setting) -> float:
    """Return the median seconds of reading one batch of windows, over 1,000 batches."""
    windows = Windows(load_trajectories(dataset), setting.context_length)
    return median(seconds(partial(windows.sample, setting.batch_size)) for _ in range(1000))


def speed_table(programs: dict[str, Program], setting: Setting, rate: float) -> Table:
    """Return a table with a row for each program, and the speedup."""
    floor = 2 * setting.multiply_adds() / rate
    title = (
        f"{setting}, {rate / 1e9:.0f} GFLOP/s, {torch.get_num_threads()} threads; "
        f"lower bound {1000 * floor:.0f} ms"
    )
    table = Table(
        "program", "ms per update", "90th percentile", "evaluation, steps/s", "episode steps", title=title
    )
    for name, program in programs.items():
        slow = sorted(program.update_seconds)[-len(program.update_seconds) // 10]
        cells = (1000 * program.update, 1000 * slow, program.rate)
        table.add_row(name, *(f"{value:.1f}" for value in cells), f"{program.steps:,}")
    theirs, ours = programs.values()
    table.add_row("speedup", f"{theirs.update / ours.update:.2f}", "", f"{ours.rate / theirs.rate:.1f}")
    return table


def facts_table(programs: dict[str, Program], batch: float, memory: Memory | None) -> Table:
    """Return the table of data loading of our agent, and of its memory if it was measured."""
    ours = programs["DecisionTransformer"]
    table = Table(title="DecisionTransformer", show_header=False)
    share = f"{batch / ours.update:.2%} of an update"
    table.add_row("reading a batch", f"{1000 * batch:.2f} ms, {share}")
    if memory is None:
        return table
    table.add_row("data", f"{memory.steps:,} steps, {memory.file_bytes / 1e6:.0f} MB, memory-mapped")
    table.add_row("peak of the process that converts them and trains", f"{memory.peak_bytes / 1e6:.0f} MB")
    return table
