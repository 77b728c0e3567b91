"""Train GTrXL on a task that cannot be solved without memory, and show what came of it."""

import csv
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from rlxf import GTrXLPPO, evaluate
from rlxf.agents.gtrxl.callbacks import AttentionMapCallback, HistogramCallback, MemoryCallback
from rlxf.evaluation import EvaluationCallback, Report, VideoCallback
from rlxf.training import RunFolder

TASK = "rlxf/TMaze-v0"
WANTED = 0.95
CHANCE = 0.5
CORRIDOR = 50
EPISODES = 200
POINTS = 20
console = Console(highlight=False, markup=False)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train GTrXL on a T-Maze with a corridor of 50 steps, then evaluate it over 200 episodes.

    The first observation tells whether the goal is up or down. Fifty steps later, at the junction, the
    agent has to remember it. Guessing succeeds half of the time. All settings are the defaults.

    The run folder gets the curve (curve.png), TensorBoard events with attention maps, histograms and a
    film, the log (progress.csv), the configuration (config.json) and the agent (checkpoint.zip).
    The exit status is 1 if fewer than 95% of the episodes succeed.

    Example: scripts/demo.sh --seed 1
    """

    steps: int = 200_000
    """Environment steps to train for, over 32 environments side by side."""
    seed: int = 0
    """Of weights, actions, minibatches and environments."""
    run: Path = Path("runs/demo")
    """Folder of the run. If it exists, the next free of runs/demo-2, runs/demo-3 ... is taken."""


class Exchanged:
    """The same agent, but half-way down the corridor it gets the memory of the maze beside it."""

    def __init__(self, agent: GTrXLPPO):
        self.agent = agent

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[Any, Any]:
        """As the agent's; its state comes with the step of the episode, which all mazes share."""
        memory: Any
        memory, step = (None, 0) if state is None or np.all(episode_start) else state
        if step == CORRIDOR // 2:
            memory = memory.rows(torch.arange(len(observation)).roll(1))
        actions, memory = self.agent.predict(observation, memory, episode_start, deterministic)
        return actions, (memory, step + 1)


def main(options: Demo) -> int:
    """Run the demonstration; gives the exit status."""
    # So small a network computes faster on one thread than torch can share it out.
    torch.set_num_threads(1)
    started = time.monotonic()
    run = make_folder(options)
    console.print(f"{TASK}: a corridor of 50 steps. Run folder: {run.path}")
    agent, curve = train(run, options)
    agent.save(run.checkpoint)
    report = evaluate(GTrXLPPO.load(run.checkpoint), TASK, EPISODES, logger=agent.logger)
    agent.logger.close()
    draw(run.path, curve)
    show_episode(agent)
    console.print(result(agent, report, (time.monotonic() - started) / 60))
    return verdict(run, report)


def make_folder(options: Demo) -> RunFolder:
    """The folder of the run, which "rlxf evaluate" can open too."""
    config = {"agent": "gtrxl", "env": TASK, "env_kwargs": {}}
    path = next(path for path in numbered(options.run) if not path.exists())
    return RunFolder.create(path, config | {"total_timesteps": options.steps, "seed": options.seed})


def numbered(path: Path) -> Iterator[Path]:
    """runs/demo, runs/demo-2, runs/demo-3 ..."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")


def train(run: RunFolder, options: Demo) -> tuple[GTrXLPPO, dict[int, Report]]:
    """The trained agent, and what it achieved after so many steps."""
    agent = GTrXLPPO("MlpGTrXLPolicy", TASK, seed=options.seed)
    agent.set_logger(run.make_logger())
    evaluations = EvaluationCallback(TASK, EPISODES // 2, every_steps=max(1, options.steps // POINTS))
    video = VideoCallback(gymnasium.make(TASK, render_mode="rgb_array"), every_steps=options.steps)
    looks = [AttentionMapCallback(), MemoryCallback(), HistogramCallback(), video]
    agent.learn(options.steps, [evaluations, *looks], progress_bar=True)
    return agent, evaluations.reports


def draw(folder: Path, curve: dict[int, Report]) -> None:
    """Write curve.png: what was evaluated, and below it what the log says of the training."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    upper.plot(list(curve), [report.success_rate for report in curve.values()], marker="o", label="GTrXL")
    upper.axhline(CHANCE, color="grey", linestyle="--", label="without memory: chance")
    upper.set(title="T-Maze, corridor of 50 steps", ylabel="success rate", ylim=(-0.03, 1.03))
    upper.legend(loc="lower right")
    lower.plot(*logged(folder, "rollout/ep_rew_mean"), label="return of an episode, while exploring")
    lower.plot(*logged(folder, "train/entropy_loss", sign=-1), label="entropy of the policy")
    lower.set(xlabel="environment steps")
    lower.legend(loc="lower right")
    figure.savefig(folder / "curve.png", dpi=120)


def logged(folder: Path, tag: str, sign: int = 1) -> tuple[list[int], list[float]]:
    """Steps and values of a tag in progress.csv."""
    with open(folder / "progress.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(tag)]
    steps = [int(row["time/total_timesteps"]) for row in rows]
    return steps, [sign * float(row[tag]) for row in rows]


def show_episode(agent: GTrXLPPO) -> None:
    """Print the beginning, the middle and the end of an episode."""
    frames = list(play(agent))
    for step in (0, len(frames) // 2, len(frames) - 2, len(frames) - 1):
        console.print(f"step {step}: {frames[step]}\n")


def play(agent: GTrXLPPO) -> Iterator[str]:
    """An episode: at each step what the agent sees, and the maze with agent A and goal G."""
    env = gymnasium.make(TASK, render_mode="ansi")
    obs, _ = env.reset(seed=0)
    state, over = None, False
    yield f"{in_words(obs)}\n{env.render()}"
    while not over:
        action, state = agent.predict(obs, state, deterministic=True)
        obs, _, over, _, _ = env.step(action)
        yield f"{in_words(obs)}\n{env.render()}"


def in_words(obs: Any) -> str:
    """What an observation of the T-Maze tells."""
    junction, hint = obs.astype(int)
    place = "the junction or an arm" if junction else "a corridor"
    return f"the agent sees {place}, " + ("no hint", "hint UP", "hint DOWN")[hint]


def result(agent: GTrXLPPO, report: Report, minutes: float) -> Table:
    """What was reached, and with how much."""
    exchanged = evaluate(Exchanged(agent), TASK, EPISODES)
    table = report.table()
    table.add_row("success rate, memories exchanged half-way", f"{exchanged.success_rate:.1%}")
    table.add_row("environment steps", f"{agent.num_timesteps:,}")
    table.add_row("minutes", f"{minutes:.1f}")
    return table


def verdict(run: RunFolder, report: Report) -> int:
    """0 if the task was learned, else 1; says where to look."""
    console.print(f"Curve: {run.path / 'curve.png'}")
    console.print(f"More: .venv/bin/tensorboard --logdir {run.path}")
    rate = report.success_rate or 0.0
    if rate < WANTED:
        console.print(f"FAILED: success rate {rate:.1%}, wanted at least {WANTED:.0%}", style="red")
        return 1
    console.print(f"Solved: success rate {rate:.1%}", style="green")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Demo, prog="scripts/demo.sh")))
