"""Online fine-tuning of a Decision Transformer after offline training on poor episodes."""

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
from rlxf.data import Trajectories, load_trajectories
from rlxf.evaluation import EvaluationCallback, Report, compare

ENVS = 8
"""Number of parallel environments."""


@dataclass(frozen=True)
class Run:
    """Result of the fine-tuning of one agent.

    Args:
        seed: random seed.
        curve: (environment steps, returns of the evaluation episodes) of each evaluation, from step 0 on.
        last: returns of the final agent in further episodes.
    """

    seed: int
    curve: list[tuple[int, list[float]]]
    last: list[float]


@dataclass
class Online:
    """Online Decision Transformer: offline training on poor episodes of a dataset, then online fine-tuning.

    The offline data are the episodes with a return below a ceiling. Online, the agent plays with the target
    return and learns from its own episodes. Evaluations use the same target return. The dataset is read from
    MINARI_DATASETS_PATH.
    """

    dataset: str = "rlxf/cartpole/mixed-v0"
    """Minari id."""
    ceiling: float = 100.0
    """Exclusive upper bound of the returns of offline episodes."""
    target: float = 500.0
    """Target return, online and in evaluations."""
    updates: int = 100
    """Offline updates. After 300, offline returns are about as high as online returns."""
    steps: int = 60_000
    """Online environment steps, over 8 environments."""
    round_steps: int = 2_000
    """Environment steps per round."""
    round_updates: int = 100
    """Updates after each round."""
    replay_episodes: int = 100
    """Capacity of the replay buffer, in episodes."""
    learning_rate: float = 1e-3
    """Learning rate of AdamW, offline and online."""
    context_length: int = 10
    """Context length, in steps."""
    episode_length: int = 500
    """Number of time step embeddings; longer than the episodes of the poor data."""
    seeds: int = 3
    """Agents."""
    evaluations: int = 10
    """Evenly spaced evaluations of each agent during fine-tuning."""
    episodes: int = 50
    """Episodes of an evaluation."""
    processes: int = 2
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-online.json")
    """Output file with all returns; the figure of the curves is saved next to it."""

    def run(self) -> None:
        """Train, print a line for each agent and the table, and write returns and figure."""
        console = Console(width=120)
        runs = sorted(self.finished(console), key=lambda run: run.seed)
        console.print(self.table(runs))
        self.output.parent.mkdir(parents=True, exist_ok=True)
        options = {**asdict(self), "output": str(self.output)}
        results = {"machine": machine(), "options": options, "runs": [asdict(run) for run in runs]}
        self.output.write_text(json.dumps(results))
        draw(runs, self.output.with_suffix(".png"))
        console.print(f"returns: {self.output}, curves: {self.output.with_suffix('.png')}")

    def finished(self, console: Console) -> Iterator[Run]:
        """Yield the results in order of completion."""
        with fresh_processes(self.processes) as pool:
            for job in as_completed([pool.submit(self.fine_tune, seed) for seed in range(self.seeds)]):
                run = job.result()
                before, after = np.mean(run.curve[0][1]), np.mean(run.last)
                console.print(f"seed {run.seed}: {before:.1f} before, {after:.1f} after")
                yield run

    def fine_tune(self, seed: int) -> Run:
        """Train one agent offline and online."""
        agent = self.offline(seed)
        evaluations = EvaluationCallback(
            agent.make_env(self.episodes),
            self.episodes,
            every_steps=self.steps // self.evaluations,
            target_returns=[self.target],
        )
        start = evaluate(
            agent, evaluations.env, self.episodes, target_returns=[self.target], seed=evaluations.seed
        )
        agent.learn_online(
            self.steps,
            self.target,
            n_envs=ENVS,
            round_steps=self.round_steps,
            round_updates=self.round_updates,
            replay_episodes=self.replay_episodes,
            callback=evaluations,
        )
        last = evaluate(agent, episodes=self.episodes, target_returns=[self.target], n_envs=self.episodes)
        curve = {0: start.first} | evaluations.reports
        return Run(
            seed,
            [(step, report.returns.tolist()) for step, report in curve.items()],
            last.first.returns.tolist(),
        )

    def offline(self, seed: int) -> DecisionTransformer:
        """Train an agent on the poor episodes of the data."""
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
        """Return the episodes with returns below the ceiling."""
        whole = minari.load_dataset(self.dataset)
        return load_trajectories(whole.filter_episodes(lambda episode: episode.rewards.sum() < self.ceiling))

    def table(self, runs: list[Run]) -> Table:
        """Return the table of the data, and of each agent before and after fine-tuning."""
        data = self.poor_part()
        rows = {
            f"{data.episodes} episodes of the data": Report(data.returns.astype(np.float64), data.lengths)
        }
        for run in runs:
            rows[f"seed {run.seed}, offline"] = as_report(run.curve[0][1])
            rows[f"seed {run.seed}, after {self.steps:,} steps"] = as_report(run.last)
        return compare(rows, f"{self.dataset} below {self.ceiling:g}: target {self.target:g}", "")


def as_report(returns: list[float]) -> Report:
    """Build a report for CartPole, where the return equals the length of an episode."""
    return Report(np.array(returns), np.array(returns, np.int64))


def draw(runs: list[Run], path: Path) -> None:
    """Plot mean return with 95% interval over environment steps, with a line for each agent."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        draw_curve(axes, run)
    axes.set(xlabel="online environment steps", ylabel="return, mean and 95% interval over episodes")
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_curve(axes: Axes, run: Run) -> None:
    """Plot the curve of one agent."""
    steps = [step for step, _ in run.curve]
    reports = [as_report(returns) for _, returns in run.curve]
    low, high = zip(*(report.ci for report in reports), strict=True)
    (line,) = axes.plot(steps, [report.mean for report in reports], marker="o", label=f"seed {run.seed}")
    axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2)
