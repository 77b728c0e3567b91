"""Online fine-tuning of Decision Transformers that were trained offline."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import minari
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.result_cache import run_missing
from rlxf import DecisionTransformer, evaluate
from rlxf.agents.decision_transformer import (
    MaximumEntropy,
    MaxReturn,
    QRegularized,
    TargetReturn,
    decision_transformer,
)
from rlxf.agents.decision_transformer.replay_buffer import REMOVALS
from rlxf.agents.offline.trajectory_model import default_return_scale
from rlxf.data import Trajectories, load_trajectories
from rlxf.evaluation import EvaluationCallback
from rlxf.evaluation.intervals import bootstrap_interval
from rlxf.training import linear
from rlxf.utils.checks import check_choice

ENVS = 8
"""Number of parallel environments."""
AGENTS: dict[str, dict[str, Any]] = {
    "imitation": {"objective": MaximumEntropy(), "conditioning": TargetReturn()},
    "critic": {"objective": QRegularized(), "conditioning": MaxReturn()},
}
"""Objective and conditioning by name; "imitation" is the Online Decision Transformer."""
COLUMNS = ("seed", "data", "offline", "online", "difference (95% interval)")
BEST_COLUMNS = ("seed", "best evaluation", "offline", "best", "difference (95% interval)")


@dataclass(frozen=True)
class Run:
    """Result of the fine-tuning of one agent.

    Args:
        seed: random seed.
        curve: (environment steps, returns of the evaluation episodes) of each evaluation, from the agent
            before fine-tuning, at 0, to the one after it. All evaluations have the same episodes.
        other: returns, in other episodes, of the agent before fine-tuning and of the one with the best
            evaluation of the curve; None in runs of earlier versions.
    """

    seed: int
    curve: list[tuple[int, list[float]]]
    other: tuple[list[float], list[float]] | None = None

    @property
    def before(self) -> np.ndarray:
        """Returns before fine-tuning."""
        return np.array(self.curve[0][1])

    @property
    def after(self) -> np.ndarray:
        """Returns after fine-tuning."""
        return np.array(self.curve[-1][1])

    @property
    def best_step(self) -> int:
        """Environment steps before the best evaluation; the first one of equal ones."""
        return max(self.curve, key=lambda evaluation: np.mean(evaluation[1]))[0]


@dataclass
class Online:
    """Online fine-tuning after offline training: returns before and after it, with the same episodes.

    Agents: imitation (MaximumEntropy with a target return, the Online Decision Transformer) or critic
    (QRegularized and MaxReturn). The interval of the difference is a bootstrap interval over episodes. A
    second table has the agent with the best evaluation, which may be the one before fine-tuning, in other
    episodes than those of the evaluations. The dataset is read from MINARI_DATASETS_PATH; Hopper requires the
    extra mujoco. Completed agents are lines of the output file and are not repeated; the figure of the curves
    is saved next to it.
    """

    dataset: str = "rlxf/cartpole/mixed-v0"
    """Minari id."""
    ceiling: float | None = 100.0
    """Exclusive upper bound of the returns of offline episodes; None for all episodes."""
    agent: str = "imitation"
    """Name of the agents: imitation or critic."""
    target: float = 500.0
    """Target return of imitation, online and in evaluations."""
    updates: int = 5_000
    """Offline updates."""
    steps: int = 60_000
    """Online environment steps, over 8 environments."""
    round_steps: int = 2_000
    """Environment steps per round."""
    round_updates: int = 100
    """Updates after each round."""
    replay_episodes: int = 100
    """Capacity of the replay buffer, in episodes."""
    replay_remove: str = "worst"
    """Episodes that a full replay buffer removes: worst, oldest or oldest-of-worse."""
    learning_rate: float = 1e-3
    """Learning rate of AdamW, offline and online."""
    final_learning_rate: float | None = None
    """Learning rate at the end of the offline training, to which it decays linearly, and online; None for the
    same rate."""
    weight_averaging: float | None = None
    """Decay of the moving average of the weights that acts; None for none."""
    width: int = 32
    """Width of the transformers, which have two layers."""
    context_length: int = 10
    """Context length, in steps."""
    episode_length: int = 500
    """Number of time step embeddings; longer than the episodes of poor data."""
    seeds: int = 3
    """Agents."""
    first_seed: int = 0
    """Seed of the first agent; settings are chosen with other seeds than those of the published table."""
    evaluations: int = 10
    """Evenly spaced evaluations of each agent during fine-tuning."""
    episodes: int = 50
    """Episodes of an evaluation."""
    processes: int = 2
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-online.jsonl")
    """Output file with a line for each agent."""

    def __post_init__(self) -> None:
        check_choice("agent", self.agent, tuple(AGENTS))
        check_choice("replay_remove", self.replay_remove, REMOVALS)

    def run(self) -> None:
        """Train missing agents, print the table and draw the curves."""
        console = Console(width=120)
        jobs: dict[str, Callable[[], Run]] = {
            f"{self.description}, seed {seed}": partial(self.fine_tune, seed)
            for seed in range(self.first_seed, self.first_seed + self.seeds)
        }
        runs = [Run(**run) for run in run_missing(jobs, self.processes, self.output).values()]
        console.print(self.table(runs), self.best_table(runs))
        draw(runs, self.output.with_suffix(".png"))
        console.print(f"returns: {self.output}, curves: {self.output.with_suffix('.png')}")

    @property
    def description(self) -> str:
        """Text that identifies everything but the seed."""
        robust = ""
        if self.final_learning_rate is not None or self.weight_averaging is not None:
            robust = f", rate to {self.final_learning_rate}, weight averaging {self.weight_averaging}"
        return (
            f"{self.dataset} below {self.ceiling}, {self.agent}, target {self.target:g}, {self.updates} + "
            f"{self.steps} steps, {self.round_updates} updates per {self.round_steps} steps, "
            f"{self.replay_episodes} episodes without {self.replay_remove}, width {self.width}, context "
            f"{self.context_length} of {self.episode_length}, rate {self.learning_rate:g}, "
            f"{self.episodes} episodes{robust}"
        )

    def fine_tune(self, seed: int) -> Run:
        """Train one agent offline and online."""
        agent = self.offline(seed)
        with TemporaryDirectory() as folder:
            best = Path(folder, "best.zip")
            evaluations = EvaluationCallback(
                agent.make_env(self.episodes),
                self.episodes,
                every_steps=self.steps // self.evaluations,
                target_returns=self.targets(agent),
                best_path=best,
            )
            curve = [(0, self.returns(agent, evaluations.env, evaluations.seed))]
            untrained = self.returns(agent, evaluations.env)
            self.learn(agent, evaluations)
            during = {step: returns_of(report) for step, report in evaluations.reports.items()}
            last = {agent.num_timesteps: self.returns(agent, evaluations.env, evaluations.seed)}
            run = Run(seed, curve + sorted((during | last).items()))
            if run.best_step == 0:
                return replace(run, other=(untrained, untrained))
            if run.best_step not in evaluations.reports:  # the last one
                agent.save(best)
            tuned = DecisionTransformer.load(best, device="cpu")
            return replace(run, other=(untrained, self.returns(tuned, evaluations.env)))

    def learn(self, agent: DecisionTransformer, callback: EvaluationCallback) -> None:
        """Fine-tune an agent online."""
        agent.learn_online(
            self.steps,
            self.target if agent.return_conditioned else None,
            n_envs=ENVS,
            round_steps=self.round_steps,
            round_updates=self.round_updates,
            replay_episodes=self.replay_episodes,
            replay_remove=self.replay_remove,
            callback=callback,
        )

    def returns(self, agent: DecisionTransformer, env: Any, seed: int | None = 0) -> list[float]:
        """Return the returns of an agent; the default seed has other episodes than the evaluations."""
        targets = self.targets(agent)
        return returns_of(evaluate(agent, env, self.episodes, seed=seed, target_returns=targets))

    def targets(self, agent: DecisionTransformer) -> list[float] | None:
        """Return the target returns of evaluations; None if the agent predicts the return."""
        return [self.target] if agent.return_conditioned else None

    def offline(self, seed: int) -> DecisionTransformer:
        """Train an agent on the episodes below the ceiling."""
        data, final = self.data(), self.final_learning_rate
        agent = DecisionTransformer(
            data,
            self.context_length,
            learning_rate=self.learning_rate if final is None else linear(self.learning_rate, final),
            weight_averaging=self.weight_averaging,
            episode_length=self.episode_length,
            return_scale=default_return_scale(data),
            core=decision_transformer(width=self.width, layers=2),
            seed=seed,
            **AGENTS[self.agent],
        )
        agent.learn(self.updates)
        if final is not None:  # `learn_online` would start the schedule again
            agent.learning_rate = final
            agent._setup_lr_schedule()
        return agent

    def data(self) -> Trajectories:
        """Return the episodes with returns below the ceiling."""
        if self.ceiling is None:
            return load_trajectories(self.dataset)
        whole, ceiling = minari.load_dataset(self.dataset), self.ceiling
        return load_trajectories(whole.filter_episodes(lambda episode: episode.rewards.sum() < ceiling))

    def table(self, runs: list[Run]) -> Table:
        """Return the mean returns of the data and of each agent before and after fine-tuning."""
        table = Table(*COLUMNS, title=f"{self.dataset}, {self.agent}: mean returns")
        mean = f"{self.data().returns.mean():.1f}"
        for run in runs:
            table.add_row(str(run.seed), mean, *compared(run.before.tolist(), run.after.tolist()))
        return table

    def best_table(self, runs: list[Run]) -> Table:
        """Return the mean returns in other episodes before fine-tuning and of the best agent."""
        table = Table(*BEST_COLUMNS, title="the agent with the best evaluation, in other episodes")
        for run in runs:
            if run.other is not None:
                table.add_row(str(run.seed), f"{run.best_step:,} steps", *compared(*run.other))
        return table


def compared(before: list[float], after: list[float]) -> tuple[str, str, str]:
    """Return two means, and their difference with its interval, for returns in the same episodes."""
    difference = np.array(after) - before
    low, high = bootstrap_interval(difference)
    interval = f"{difference.mean():.1f} ({low:.1f} to {high:.1f})"
    return f"{np.mean(before):.1f}", f"{np.mean(after):.1f}", interval


def returns_of(evaluation: Any) -> list[float]:
    """Return the returns of a report, or of the only report of a sweep over targets."""
    report = getattr(evaluation, "first", evaluation)
    return [float(each) for each in report.returns]


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
    returns = [np.array(values) for _, values in run.curve]
    low, high = zip(*map(bootstrap_interval, returns), strict=True)
    (line,) = axes.plot(steps, [each.mean() for each in returns], marker="o", label=f"seed {run.seed}")
    axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2)
