"""Returns of GTrXLPPO, PPO and RecurrentPPO on ordinary tasks, each with its own default settings."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
from gymnasium.wrappers import TransformObservation
from matplotlib.lines import Line2D
from rich.console import Console
from rich.table import Table
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env as make_sb3_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from benchmarks.result_cache import check_names, run_missing
from rlxf.agents.gtrxl import GTrXLPPO

EVALUATION_ENVS = 10
EVALUATION_SEED = 1_000_000
POINTS = 40
"""Number of points of a learning curve."""


def without_velocities(env: gymnasium.Env) -> gymnasium.Env:
    """Restrict observations of CartPole to the position of the cart and the angle of the pole."""
    space = env.observation_space
    assert isinstance(space, gymnasium.spaces.Box)
    restricted = gymnasium.spaces.Box(space.low[[0, 2]], space.high[[0, 2]], dtype=np.float32)
    return TransformObservation(env, lambda observation: observation[[0, 2]], restricted)


def masked_cart_pole() -> gymnasium.Env:
    """CartPole-v1 without velocities."""
    return without_velocities(gymnasium.make("CartPole-v1"))


@dataclass(frozen=True)
class Task:
    """Task with the expected return of GTrXLPPO.

    Args:
        env: a Gymnasium id, or a function that makes one environment.
        steps: environment steps of training.
        wanted: minimum mean return that the agent should reach.
    """

    env: str | Callable[[], gymnasium.Env]
    steps: int
    wanted: float


TASKS = {
    "CartPole-v1": Task("CartPole-v1", 100_000, 475),
    "CartPole-v1 without velocities": Task(masked_cart_pole, 150_000, 500),
    "Acrobot-v1": Task("Acrobot-v1", 100_000, -100),
    "Pendulum-v1": Task("Pendulum-v1", 150_000, -200),
    "LunarLander-v3": Task("LunarLander-v3", 500_000, 150),
    "rlxf/TMaze-v0, corridor 50": Task("rlxf/TMaze-v0", 200_000, 0.95),
    "rlxf/TMaze-v0, corridor 100": Task(
        partial(gymnasium.make, "rlxf/TMaze-v0", corridor_length=100), 300_000, 0.95
    ),
    "popgym-RepeatPreviousEasy-v0": Task("popgym:popgym-RepeatPreviousEasy-v0", 200_000, 0.95),
}


@dataclass(frozen=True)
class Run:
    """One agent's training and its evaluation.

    Args:
        steps: environment steps of training.
        mean: mean return of the evaluation.
        deviation: standard deviation of the returns.
        explained_variance: median explained variance of the value function in the second half of training.
        curve: (environment steps, mean return of the training episodes that ended since the last point).
        seconds: of training.
    """

    steps: int
    mean: float
    deviation: float
    explained_variance: float
    curve: list[tuple[int, float]]
    seconds: float


class Curve(BaseCallback):
    """Callback that records the mean return of episodes in each of `POINTS` equal parts of training.

    It also records the explained variance of each update.
    """

    def __init__(self, steps: int):
        super().__init__()
        self.every, self.points, self._returns = steps // POINTS, list[tuple[int, float]](), list[float]()
        self.explained_variances: list[float] = []

    def _on_rollout_start(self) -> None:
        value = self.logger.name_to_value.get("train/explained_variance")
        if value is not None:
            self.explained_variances.append(float(value))

    def _on_step(self) -> bool:
        self._returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        if self.num_timesteps >= self.every * (len(self.points) + 1) and self._returns:
            self.points.append((self.num_timesteps, float(mean(self._returns))))
            self._returns.clear()
        return True


def gtrxl(env: Any, seed: int) -> OnPolicyAlgorithm:
    """GTrXLPPO with default settings: 32 environments."""
    if not isinstance(env, str):
        env = make_sb3_env(env, 32, seed)
    return GTrXLPPO("MlpGTrXLPolicy", env, seed=seed, device="cpu")


def ppo(env: Any, seed: int) -> OnPolicyAlgorithm:
    """PPO of Stable-Baselines3 with default settings: one environment."""
    return PPO("MlpPolicy", make_sb3_env(env, 1, seed), seed=seed, device="cpu")


def recurrent_ppo(env: Any, seed: int) -> OnPolicyAlgorithm:
    """RecurrentPPO of sb3-contrib with default settings: one environment."""
    return RecurrentPPO("MlpLstmPolicy", make_sb3_env(env, 1, seed), seed=seed, device="cpu")


PROGRAMS = {"GTrXLPPO": gtrxl, "PPO": ppo, "RecurrentPPO": recurrent_ppo}


def train(task: Task, program: str, seed: int, episodes: int) -> Run:
    """Train with default settings, then evaluate without exploration in environments with other seeds."""
    agent, curve = PROGRAMS[program](task.env, seed), Curve(task.steps)
    start = time.perf_counter()
    agent.learn(task.steps, callback=curve)
    seconds = time.perf_counter() - start
    env = make_sb3_env(task.env, EVALUATION_ENVS, EVALUATION_SEED)
    returns, _ = evaluate_policy(agent, env, episodes, return_episode_rewards=True)
    explained = float(np.median(curve.explained_variances[len(curve.explained_variances) // 2 :]))
    return Run(
        agent.num_timesteps,
        float(np.mean(returns)),
        float(np.std(returns)),
        explained,
        curve.points,
        seconds,
    )


@dataclass
class Defaults:
    """Mean return of GTrXLPPO, PPO and RecurrentPPO on ordinary tasks, each with its default settings."""

    tasks: tuple[str, ...] = ()
    """Names of the tasks; default: all."""
    programs: tuple[str, ...] = tuple(PROGRAMS)
    """Names of the programs."""
    seeds: int = 5
    """Seeds of each program on each task, from 0."""
    episodes: int = 100
    """Episodes of the evaluation after training."""
    processes: int = 2
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-defaults.jsonl")
    """Output file with a line per run; completed runs are not repeated. The figure is saved next to it."""
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.names = self.tasks or tuple(TASKS)
        check_names(tasks=(self.names, TASKS), programs=(self.programs, PROGRAMS))

    def run(self) -> None:
        """Train missing runs, print a line for each, print the table, and save the figure."""
        keys = {
            f"{name} | {program} | {seed}": partial(train, TASKS[name], program, seed, self.episodes)
            for seed in range(self.seeds)
            for program in self.programs
            for name in self.names
        }
        runs = run_missing(keys, self.processes, self.output)
        Console(width=140).print(table(runs))
        draw(runs, self.output.with_suffix(".png"))


def grouped(runs: dict[str, dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Group runs by (task, program), in the order of seeds."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for key, run in sorted(runs.items()):
        task, program, _ = key.split(" | ")
        groups.setdefault((task, program), []).append(run)
    return groups


def table(runs: dict[str, dict[str, Any]]) -> Table:
    """Return a table with a row for each program on each task."""
    columns = ("task", "steps", "expected", "program", "mean return", "by seed", "explained variance")
    result = Table(*columns, title="Default settings, final agents, no exploration")
    for (task, program), group in grouped(runs).items():
        means = [run["mean"] for run in group]
        result.add_row(
            task,
            f"{TASKS[task].steps:,}",
            f"{TASKS[task].wanted:g}",
            program,
            f"{mean(means):.4g}",
            " ".join(f"{each:.4g}" for each in means),
            f"{min(run['explained_variance'] for run in group):.2f}",
        )
    return result


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot training returns over steps: a panel for each task, as in `TASKS`, and a line for each run."""
    groups = grouped(runs)
    names = [name for name in TASKS if name in {task for task, _ in groups}]
    columns = min(len(names), 4)
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.5 * columns, 3.2 * rows), squeeze=False)
    colors = dict(zip(PROGRAMS, ("tab:blue", "tab:orange", "tab:gray"), strict=True))
    for (task, program), group in groups.items():
        axis = axes.flat[names.index(task)]
        for run in group:
            steps, returns = zip(*((step / 1000, value) for step, value in run["curve"]), strict=True)
            axis.plot(steps, returns, color=colors[program], alpha=0.7)
        axis.set(title=task, xlabel="environment steps, thousands")
    axes[0, 0].set_ylabel("mean training return")
    lines = [Line2D([], [], color=color, label=program) for program, color in colors.items()]
    figure.legend(handles=lines, loc="lower right", ncols=len(lines))
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=120)
