"""Agreement of the returns of Decision Transformers with their target returns."""

import json
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from rich.console import Console
from rich.table import Table

from benchmarks import hugging_face
from benchmarks.machine import fresh_processes
from benchmarks.offline_setting import SETTINGS, Setting
from benchmarks.result_cache import check_names
from rlxf import DecisionTransformer, evaluate
from rlxf.data import ReferenceScores, load_trajectories
from rlxf.evaluation import Report, TargetSweep, compare
from rlxf.utils.checks import check_choice

HOPPER = "rlxf/hopper/medium-v0"
OURS, THEIRS = "ours", "hf"
PROGRAMS = {OURS: "DecisionTransformer", THEIRS: "HF DecisionTransformerModel"}
CLONING: dict[str, dict[str, tuple[float, ...]]] = {
    HOPPER: {
        "behavior cloning": (1623, 1073, 1449),
        "behavior cloning, best 10%": (2617, 1868, 3435),
    },
    "rlxf/hopper/medium-replay-like-v0": {
        "behavior cloning": (246, 658),
        "behavior cloning, best 10%": (2408, 1840),
    },
    "rlxf/hopper/medium-expert-v0": {
        "behavior cloning": (3582,),
        "behavior cloning, best 10%": (3644,),
    },
}
"""Mean returns of behavior cloning per seed: an MLP, 20,000 updates, 20 episodes; measured separately."""


@dataclass(frozen=True)
class Job:
    """Settings of one agent: program, data, sizes, seed and number of target returns."""

    dataset: str
    program: str
    setting: str
    updates: int
    seed: int
    episodes: int
    targets: int
    learning_rate: float
    decay: float

    @property
    def key(self) -> list[Any]:
        """Key of the agent in the output file, as a JSON list."""
        return list(astuple(self))

    @property
    def sizes(self) -> Setting:
        """Training settings of the agent."""
        return replace(SETTINGS[self.setting], learning_rate=self.learning_rate, decay=self.decay)


@dataclass
class Targets:
    """Train agents on datasets with several seeds, and tabulate achieved returns over target returns.

    Scores are those for the highest return of the data as target. The first seeds have six further targets,
    down to the 10% quantile. All results are those of the final checkpoint. HF's model is trained on the same
    windows with the same seeds, if observations are vectors and actions are continuous.

    Completed runs are lines of the output file and are not repeated, so several calls can share a table.
    Datasets are read from MINARI_DATASETS_PATH; Hopper requires the extra mujoco.
    """

    datasets: tuple[str, ...] = (HOPPER, "rlxf/hopper/medium-replay-like-v0")
    """Minari ids."""
    programs: tuple[str, ...] = (OURS, THEIRS)
    """Programs: ours and hf."""
    setting: str = "small"
    """Sizes: small (width 64, 2 layers) or published (width 128, 3 layers)."""
    learning_rate: float = 1e-3
    """Learning rate of both programs after warm-up. The authors: 1e-4, constant, for 100,000 updates."""
    decay: float = 0.1
    """Learning rate at the last update as a fraction of the initial one; the decay is linear."""
    updates: int = 10_000
    """Updates of each agent."""
    seeds: int = 3
    """Agents of each program on each dataset."""
    swept: int = 3
    """Number of seeds with seven target returns; the others only have the highest target."""
    episodes: int = 50
    """Evaluation episodes per target return."""
    processes: int = 2
    """Parallel processes, with one thread each."""
    venv: Path = hugging_face.CACHE
    """Folder of the virtual environment of HF's model."""
    output: Path = Path("runs/bench-targets.jsonl")
    """Output file with a line for each agent; figures are saved next to it."""

    def __post_init__(self) -> None:
        check_names(programs=(self.programs, PROGRAMS))
        check_choice("setting", self.setting, tuple(SETTINGS))

    def run(self) -> None:
        """Train missing agents, print a line for each, and the tables at the end."""
        console = Console(width=120)
        if THEIRS in self.programs:
            hugging_face.install(self.venv)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        for job, answer in self.finished():
            with open(self.output, "a") as file:
                file.write(json.dumps({"key": job.key, "answer": answer}) + "\n")
            console.print(f"{job}: Spearman {answer['spearman']}")
        for dataset in self.datasets:
            self.show(dataset, console)

    def jobs(self) -> list[Job]:
        """Return the settings of all agents."""
        return [
            Job(
                dataset,
                program,
                self.setting,
                self.updates,
                seed,
                self.episodes,
                7 if seed < self.swept else 1,
                self.learning_rate,
                self.decay,
            )
            for seed in range(self.seeds)
            for dataset in self.datasets
            for program in self.programs
            if program == OURS or supported_by_hf(dataset)
        ]

    def finished(self) -> Iterator[tuple[Job, dict[str, Any]]]:
        """Train missing agents, and yield their results in order of completion."""
        done = self.answers()
        missing = [job for job in self.jobs() if str(job.key) not in done]
        with fresh_processes(self.processes) as pool:
            running = {pool.submit(train_and_evaluate, job, self.venv): job for job in missing}
            for future in as_completed(running):
                yield running[future], future.result()

    def answers(self) -> dict[str, dict[str, Any]]:
        """Read the results of the output file by key."""
        if not self.output.exists():
            return {}
        lines = map(json.loads, self.output.read_text().splitlines())
        return {str(line["key"]): line["answer"] for line in lines}

    def show(self, dataset: str, console: Console) -> None:
        """Print the tables of a dataset, and save a figure for each program."""
        results = self.sweeps(dataset)
        if not results:
            return
        console.print(scores_table(dataset, results))
        for program, sweeps in results.items():
            whole = pooled(sweeps)
            table = whole.table()
            by_seed = ", ".join("none" if s.spearman is None else f"{s.spearman:.2f}" for s in sweeps)
            table.title = f"{dataset}: {PROGRAMS[program]}\n{table.title}; by seed {by_seed}"
            picture = self.output.with_name(f"{self.output.stem}-{dataset.replace('/', '-')}-{program}.png")
            whole.plot(picture)
            console.print(table, f"picture: {picture}")

    def sweeps(self, dataset: str) -> dict[str, list[TargetSweep]]:
        """Return the target sweeps of the agents of each program on a dataset."""
        done, results = self.answers(), defaultdict(list)
        for job in self.jobs():
            if job.dataset == dataset and str(job.key) in done:
                results[job.program].append(as_sweep(done[str(job.key)]))
        return dict(results)


def train_and_evaluate(job: Job, venv: Path) -> dict[str, Any]:
    """Train an agent, evaluate it for each target, and return its `TargetSweep` as JSON data."""
    targets = targets_of(job.dataset)[: job.targets]
    if job.program == OURS:
        return ours(job, targets)
    return hugging_face.run_task(
        venv,
        "train_and_evaluate",
        job.sizes,
        dataset=job.dataset,
        updates=job.updates,
        seed=job.seed,
        episodes=job.episodes,
        targets=targets,
    )


def ours(job: Job, targets: list[float]) -> dict[str, Any]:
    """Train and evaluate our agent, as `hugging_face_tasks.train_and_evaluate` does for HF's model."""
    agent = DecisionTransformer(job.dataset, seed=job.seed, device="cpu", **job.sizes.arguments())
    agent.generator.manual_seed(job.seed)  # same windows as for HF's model
    agent.learn(job.updates)
    env = agent.make_env(job.episodes)
    sweep = evaluate(agent, env, job.episodes, target_returns=targets)
    env.close()
    return json.loads(sweep.to_json())


def targets_of(dataset: str) -> list[float]:
    """Return seven targets from the highest return of the data down to the 10% quantile, distinct."""
    returns = load_trajectories(dataset).returns
    targets = np.linspace(returns.max(), np.quantile(returns, 0.1), 7)
    return list(dict.fromkeys(targets.tolist()))


def supported_by_hf(dataset: str) -> bool:
    """Return whether HF's model supports a dataset: vector observations and continuous actions."""
    data = load_trajectories(dataset)
    return data.observation_mean is not None and isinstance(data.action_space, spaces.Box)


def as_sweep(answer: dict[str, Any]) -> TargetSweep:
    """Build a sweep from the data of `TargetSweep.to_json`."""
    reports = {row["target"]: as_report(row) for row in answer["targets"]}
    return TargetSweep(reports, answer["data_range"] and tuple(answer["data_range"]))


def as_report(row: dict[str, Any]) -> Report:
    """Build a report from the data of `Report.to_json`."""
    references = None if row["references"] is None else ReferenceScores(**row["references"])
    return Report(np.array(row["returns"]), np.array(row["lengths"]), references=references)


def pooled(sweeps: list[TargetSweep]) -> TargetSweep:
    """Pool the episodes of several agents per target; agents without a target are left out of it."""
    reports = {
        target: joined([s.reports[target] for s in sweeps if target in s.reports])
        for target in sweeps[0].reports
    }
    return TargetSweep(reports, sweeps[0].data_range)


def joined(reports: list[Report]) -> Report:
    """Pool all episodes in one report. Its interval is over episodes; seeds have rows of their own."""
    returns, lengths = (
        np.concatenate([getattr(r, name) for r in reports]) for name in ("returns", "lengths")
    )
    return Report(returns, lengths, references=reports[0].references)


def scores_table(dataset: str, results: dict[str, list[TargetSweep]]) -> Table:
    """Return the table of the data, behavior cloning, and each program at the highest target."""
    data = load_trajectories(dataset)
    rows = {
        "the data": Report(data.returns.astype(np.float64), data.lengths, references=data.reference_scores)
    }
    for name, means in CLONING.get(dataset, {}).items():
        returns = np.array(means, np.float64)
        rows[f"{name}, {len(means)} seeds"] = Report(
            returns, np.zeros(len(means)), references=data.reference_scores
        )
    for program, sweeps in results.items():
        reports = [sweep.first for sweep in sweeps]
        rows[f"{PROGRAMS[program]}, {len(reports)} seeds"] = joined(reports)
        rows |= {f"  seed {number}, {program}": report for number, report in enumerate(reports)}
    return compare(rows, f"{dataset}: last checkpoint, target {highest_target(results):g}", "")


def highest_target(results: dict[str, list[TargetSweep]]) -> float:
    """Return the highest target, which is the first."""
    return float(next(iter(results.values()))[0].targets[0])
