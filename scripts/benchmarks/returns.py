"""What returns Decision Transformers reach, and whether they reach what they are asked for."""

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
from rlxf import DecisionTransformer, evaluate
from rlxf.envs.trajectories import ReferenceScores, load_trajectories
from rlxf.evaluation import Report, TargetSweep, compare

HOPPER = "rlxf/hopper/medium-v0"
OURS, THEIRS = "ours", "hf"
PROGRAMS = {OURS: "DecisionTransformer", THEIRS: "HF DecisionTransformerModel"}
CLONING: dict[str, dict[str, tuple[float, ...]]] = {
    HOPPER: {
        "behaviour cloning": (1623, 1073, 1449),
        "behaviour cloning, best 10%": (2617, 1868, 3435),
    },
    "rlxf/hopper/medium-replay-like-v0": {
        "behaviour cloning": (246, 658),
        "behaviour cloning, best 10%": (2408, 1840),
    },
    "rlxf/hopper/medium-expert-v0": {
        "behaviour cloning": (3582,),
        "behaviour cloning, best 10%": (3644,),
    },
}
"""Mean returns, one a seed: an MLP, 20,000 updates, 20 episodes; measured when the data were recorded."""


@dataclass(frozen=True)
class Job:
    """One agent: its program, data, sizes and seed, and how many returns it is asked for."""

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
        """What tells it from others, as JSON takes it."""
        return list(astuple(self))

    @property
    def sizes(self) -> Setting:
        """What it is trained with."""
        return replace(SETTINGS[self.setting], learning_rate=self.learning_rate, decay=self.decay)


@dataclass
class Returns:
    """Train on datasets with several seeds, ask the agents for returns, and put all of it in tables.

    Scores are given for the highest return of the data. The first seeds are asked for six more, down to the
    10% quantile. Every row is of last checkpoints. HF's model learns from the same windows with the
    same seeds, where observations are vectors and actions numbers.

    A run that is done is a line of the output and is not made again: several calls share one table. Datasets
    are read from MINARI_DATASETS_PATH; Hopper needs the extra mujoco.
    """

    datasets: tuple[str, ...] = (HOPPER, "rlxf/hopper/medium-replay-like-v0")
    """Minari ids."""
    programs: tuple[str, ...] = (OURS, THEIRS)
    """Out of ours and hf."""
    setting: str = "small"
    """Sizes: small (width 64, 2 layers) or published (width 128, 3 layers)."""
    learning_rate: float = 1e-3
    """Of both programs, behind the warm-up. The authors' is 1e-4, without decay, for 100,000 updates."""
    decay: float = 0.1
    """What part of it is left at the last update; it falls linearly."""
    updates: int = 10_000
    """Updates of each agent."""
    seeds: int = 3
    """Agents of each program on each dataset."""
    swept: int = 3
    """How many of them are asked for seven returns; the others for the highest alone."""
    episodes: int = 50
    """Episodes of an agent's evaluation, for each target."""
    processes: int = 2
    """Agents at a time, one thread each."""
    venv: Path = hugging_face.CACHE
    """Where to make the environment for HF's model."""
    output: Path = Path("runs/bench-returns.jsonl")
    """Where to write all returns, a line for each agent; pictures stand beside it."""

    def __post_init__(self) -> None:
        for name, given, known in (
            ("setting", {self.setting}, SETTINGS),
            ("programs", {*self.programs}, PROGRAMS),
        ):
            if given - set(known):
                raise ValueError(f"{name} must be among {', '.join(known)}, got {sorted(given)}")

    def run(self) -> None:
        """Train what is missing, print a line as each agent is done, and the tables at the end."""
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
        """All agents that are asked for."""
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
            if program == OURS or fits_theirs(dataset)
        ]

    def finished(self) -> Iterator[tuple[Job, dict[str, Any]]]:
        """The agents that were missing, as they are done."""
        done = self.answers()
        missing = [job for job in self.jobs() if str(job.key) not in done]
        with fresh_processes(self.processes) as pool:
            running = {pool.submit(learn_and_ask, job, self.venv): job for job in missing}
            for future in as_completed(running):
                yield running[future], future.result()

    def answers(self) -> dict[str, dict[str, Any]]:
        """What is in the output: the key of each job -> what came of it."""
        if not self.output.exists():
            return {}
        lines = map(json.loads, self.output.read_text().splitlines())
        return {str(line["key"]): line["answer"] for line in lines}

    def show(self, dataset: str, console: Console) -> None:
        """The tables of a dataset, and a picture for each program."""
        found = self.sweeps(dataset)
        if not found:
            return
        console.print(scores_table(dataset, found))
        for program, sweeps in found.items():
            whole = pooled(sweeps)
            table = whole.table()
            singly = ", ".join("none" if s.spearman is None else f"{s.spearman:.2f}" for s in sweeps)
            table.title = f"{dataset}: {PROGRAMS[program]}\n{table.title}; of each seed {singly}"
            picture = self.output.with_name(f"{self.output.stem}-{dataset.replace('/', '-')}-{program}.png")
            whole.plot(picture)
            console.print(table, f"picture: {picture}")

    def sweeps(self, dataset: str) -> dict[str, list[TargetSweep]]:
        """What the agents of each program reached on a dataset."""
        done, found = self.answers(), defaultdict(list)
        for job in self.jobs():
            if job.dataset == dataset and str(job.key) in done:
                found[job.program].append(as_sweep(done[str(job.key)]))
        return dict(found)


def learn_and_ask(job: Job, venv: Path) -> dict[str, Any]:
    """Train an agent, ask it for each target, and give its `TargetSweep` as data."""
    targets = targets_of(job.dataset)[: job.targets]
    if job.program == OURS:
        return ours(job, targets)
    return hugging_face.call(
        venv,
        "learn_and_ask",
        job.sizes,
        dataset=job.dataset,
        updates=job.updates,
        seed=job.seed,
        episodes=job.episodes,
        targets=targets,
    )


def ours(job: Job, targets: list[float]) -> dict[str, Any]:
    """As `hugging_face_tasks.learn_and_ask`, with ours."""
    agent = DecisionTransformer(job.dataset, seed=job.seed, device="cpu", **job.sizes.arguments())
    agent.order.manual_seed(job.seed)  # the windows that HF's model gets
    agent.learn(job.updates)
    env = agent.make_env(job.episodes)
    sweep = evaluate(agent, env, job.episodes, target_returns=targets)
    env.close()
    return json.loads(sweep.to_json())


def targets_of(dataset: str) -> list[float]:
    """Seven, evenly from the data's highest return down to the 10% quantile; once each."""
    returns = load_trajectories(dataset).returns
    targets = np.linspace(returns.max(), np.quantile(returns, 0.1), 7)
    return list(dict.fromkeys(targets.tolist()))


def fits_theirs(dataset: str) -> bool:
    """Whether HF's model reads such data: vectors, and actions that are numbers."""
    data = load_trajectories(dataset)
    return data.observation_mean is not None and isinstance(data.action_space, spaces.Box)


def as_sweep(answer: dict[str, Any]) -> TargetSweep:
    """What `TargetSweep.to_json` told."""
    reports = {row["target"]: as_report(row) for row in answer["targets"]}
    return TargetSweep(reports, answer["data_range"] and tuple(answer["data_range"]))


def as_report(row: dict[str, Any]) -> Report:
    """What `Report.to_json` told."""
    references = None if row["references"] is None else ReferenceScores(**row["references"])
    return Report(np.array(row["returns"]), np.array(row["lengths"]), references=references)


def pooled(sweeps: list[TargetSweep]) -> TargetSweep:
    """The episodes of several agents as those of one; of those who were asked for a return."""
    reports = {
        target: joined([s.reports[target] for s in sweeps if target in s.reports])
        for target in sweeps[0].reports
    }
    return TargetSweep(reports, sweeps[0].data_range)


def joined(reports: list[Report]) -> Report:
    """All episodes in one report. Its interval is over episodes: how seeds differ, their own rows show."""
    returns, lengths = (
        np.concatenate([getattr(r, name) for r in reports]) for name in ("returns", "lengths")
    )
    return Report(returns, lengths, references=reports[0].references)


def scores_table(dataset: str, found: dict[str, list[TargetSweep]]) -> Table:
    """The data, behaviour cloning, and each program at the highest target: all seeds, and each of them."""
    data = load_trajectories(dataset)
    rows = {
        "the data": Report(data.returns.astype(np.float64), data.lengths, references=data.reference_scores)
    }
    for name, means in CLONING.get(dataset, {}).items():
        returns = np.array(means, np.float64)
        rows[f"{name}, {len(means)} seeds"] = Report(
            returns, np.zeros(len(means)), references=data.reference_scores
        )
    for program, sweeps in found.items():
        reports = [sweep.first for sweep in sweeps]
        rows[f"{PROGRAMS[program]}, {len(reports)} seeds"] = joined(reports)
        rows |= {f"  seed {number}, {program}": report for number, report in enumerate(reports)}
    return compare(rows, f"{dataset}: last checkpoint, asked for {found_target(found):g}", "")


def found_target(found: dict[str, list[TargetSweep]]) -> float:
    """The highest target, which is the first."""
    return float(next(iter(found.values()))[0].targets[0])
