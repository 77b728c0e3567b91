"""Whether a Decision Transformer that has seen only poor play gets better by playing itself."""

import json
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import minari
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.machine import fresh_processes, machine
from rlxf import DecisionTransformer, evaluate
from rlxf.agents.decision_transformer import MaximumEntropy, decision_transformer
from rlxf.envs.trajectories import Trajectories, load_trajectories
from rlxf.evaluation import EvaluationCallback, Report, compare

ENVS = 8
"""That are played in side by side."""


@dataclass(frozen=True)
class Run:
    """One agent's fine-tuning.

    Args:
        seed: of everything.
        curve: (steps played, returns of an evaluation's episodes) before the first step and from then on.
        last: returns of the last agent in other episodes than those of the curve.
    """

    seed: int
    curve: list[tuple[int, list[float]]]
    last: list[float]


@dataclass
class Online:
    """Online Decision Transformer: offline on the poor part of a dataset, then on in the environment.

    The data are the episodes that return less than a ceiling: what is better, the agent has not seen. Then it
    plays, asked for the target, and learns from what it got. Evaluations ask for the same target. The
    dataset is read from MINARI_DATASETS_PATH.
    """

    dataset: str = "rlxf/cartpole/mixed-v0"
    """Minari id."""
    ceiling: float = 100.0
    """Episodes that return this much or more are left out."""
    target: float = 500.0
    """What is asked for, while playing and in evaluations."""
    updates: int = 100
    """Updates offline. After 300 it does about as well offline as online: poor data say no more."""
    steps: int = 60_000
    """Steps online, over 8 environments."""
    round_steps: int = 2_000
    """Steps of a round."""
    round_updates: int = 100
    """Updates after a round."""
    replay_episodes: int = 100
    """Episodes that the replay holds."""
    learning_rate: float = 1e-3
    """AdamW's, offline and online."""
    context_length: int = 10
    """Steps that the agent sees."""
    episode_length: int = 500
    """Time steps with an embedding of their own; poor data have short episodes."""
    seeds: int = 3
    """Agents."""
    evaluations: int = 10
    """Evaluations of each agent while it plays, evenly spread."""
    episodes: int = 50
    """Episodes of an evaluation."""
    processes: int = 2
    """Agents at a time, one thread each."""
    output: Path = Path("runs/bench-online.json")
    """Where to write all returns; the picture of the curves stands beside it."""

    def run(self) -> None:
        """Train, print a line as each agent is done and the table at the end, write returns and picture."""
        console = Console(width=120)
        runs = sorted(self.finished(console), key=lambda run: run.seed)
        console.print(self.table(runs))
        self.output.parent.mkdir(parents=True, exist_ok=True)
        options = {**asdict(self), "output": str(self.output)}
        found = {"machine": machine(), "options": options, "runs": [asdict(run) for run in runs]}
        self.output.write_text(json.dumps(found))
        draw(runs, self.output.with_suffix(".png"))
        console.print(f"returns: {self.output}, curves: {self.output.with_suffix('.png')}")

    def finished(self, console: Console) -> Iterator[Run]:
        """The agents as they are done."""
        with fresh_processes(self.processes) as pool:
            for job in as_completed([pool.submit(self.fine_tune, seed) for seed in range(self.seeds)]):
                run = job.result()
                before, after = np.mean(run.curve[0][1]), np.mean(run.last)
                console.print(f"seed {run.seed}: {before:.1f} before, {after:.1f} after")
                yield run

    def fine_tune(self, seed: int) -> Run:
        """One agent from its first update to its last."""
        agent = self.offline(seed)
        watching = EvaluationCallback(
            agent.make_env(self.episodes),
            self.episodes,
            every_steps=self.steps // self.evaluations,
            target_returns=[self.target],
        )
        start = evaluate(agent, watching.env, self.episodes, target_returns=[self.target], seed=watching.seed)
        agent.learn_online(
            self.steps,
            self.target,
            n_envs=ENVS,
            round_steps=self.round_steps,
            round_updates=self.round_updates,
            replay_episodes=self.replay_episodes,
            callback=watching,
        )
        last = evaluate(agent, episodes=self.episodes, target_returns=[self.target], n_envs=self.episodes)
        curve = {0: start.first} | watching.reports
        return Run(
            seed,
            [(step, report.returns.tolist()) for step, report in curve.items()],
            last.first.returns.tolist(),
        )

    def offline(self, seed: int) -> DecisionTransformer:
        """The agent that has learned from the poor part of the data."""
        agent = DecisionTransformer(
            self.poor_part(),
            self.context_length,
            learning_rate=self.learning_rate,
            episode_length=self.episode_length,
            objective=MaximumEntropy(),
            core=decision_transformer(width=32, layers=2),
            seed=seed,
        )
        return agent.learn(self.updates)

    def poor_part(self) -> Trajectories:
        """The episodes below the ceiling."""
        whole = minari.load_dataset(self.dataset)
        return load_trajectories(whole.filter_episodes(lambda episode: episode.rewards.sum() < self.ceiling))

    def table(self, runs: list[Run]) -> Table:
        """The data, and each agent before and after."""
        data = self.poor_part()
        rows = {
            f"{data.episodes} episodes of the data": Report(data.returns.astype(np.float64), data.lengths)
        }
        for run in runs:
            rows[f"seed {run.seed}, offline"] = as_report(run.curve[0][1])
            rows[f"seed {run.seed}, after {self.steps:,} steps"] = as_report(run.last)
        return compare(rows, f"{self.dataset} below {self.ceiling:g}: asked for {self.target:g}", "")


def as_report(returns: list[float]) -> Report:
    """Of CartPole, which pays 1 for each step."""
    return Report(np.array(returns), np.array(returns, np.int64))


def draw(runs: list[Run], path: Path) -> None:
    """Mean return over steps played, with its 95% interval: a line for each agent."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        draw_curve(axes, run)
    axes.set(xlabel="steps played online", ylabel="return, mean and 95% interval over episodes")
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_curve(axes: Axes, run: Run) -> None:
    """One agent."""
    steps = [step for step, _ in run.curve]
    reports = [as_report(returns) for _, returns in run.curve]
    low, high = zip(*(report.ci for report in reports), strict=True)
    (line,) = axes.plot(steps, [report.mean for report in reports], marker="o", label=f"seed {run.seed}")
    axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2)
