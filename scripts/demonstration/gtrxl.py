"""First part of the demo: train GTrXL on a task that requires memory."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from matplotlib.figure import Figure
from stable_baselines3.common.callbacks import CheckpointCallback

from rlxf import GTrXLPPO
from rlxf.agents.gtrxl.callbacks import AttentionMapCallback, HistogramCallback, MemoryCallback
from rlxf.cli.progress import ONLINE_METRICS, progress
from rlxf.evaluation import EvaluationCallback, Report, VideoCallback
from rlxf.training import RunFolder

TASK = "rlxf/TMaze-v0"
CHANCE = 0.5
CORRIDOR = 50
STAGES = "stages"


class Exchanged:
    """Agent whose memory is replaced, halfway through the corridor, by that of another environment."""

    def __init__(self, agent: GTrXLPPO):
        self.agent = agent

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[Any, Any]:
        """Predict actions; the state is the memory and the episode step, equal in all environments."""
        memory: Any
        memory, step = (None, 0) if state is None or np.all(episode_start) else state
        if step == CORRIDOR // 2:
            memory = memory.rows(torch.arange(len(observation)).roll(1))
        actions, memory = self.agent.predict(observation, memory, episode_start, deterministic)
        return actions, (memory, step + 1)


def make_run(path: Path, steps: int, seed: int) -> RunFolder:
    """Create the run folder, which "rlxf evaluate" can open."""
    config = {"agent": "gtrxl", "env": TASK, "env_kwargs": {}, "program": "scripts/demo.sh"}
    return RunFolder.create(path, config | {"total_timesteps": steps, "seed": seed})


def train(run: RunFolder, stages: int, episodes: int) -> tuple[GTrXLPPO, dict[int, Report]]:
    """Train an agent and save it; return the agent and its evaluations by number of steps.

    Args:
        run: run folder from `make_run`.
        stages: number of evaluations and checkpoints during training.
        episodes: episodes of each evaluation.
    """
    steps = run.config["total_timesteps"]
    agent = GTrXLPPO("MlpGTrXLPolicy", TASK, seed=run.config["seed"])
    agent.set_logger(run.make_logger())
    every = max(1, steps // stages)
    evaluations = EvaluationCallback(TASK, episodes, every_steps=every)
    checkpoints = CheckpointCallback(max(1, every // agent.n_envs), str(run.path / STAGES))
    video = VideoCallback(gymnasium.make(TASK, render_mode="rgb_array"), every_steps=steps)
    diagnostics = [AttentionMapCallback(), MemoryCallback(), HistogramCallback(), video]
    callbacks = [evaluations, checkpoints, *diagnostics]
    with progress(True, "steps", steps, ONLINE_METRICS, callbacks) as display:
        agent.learn(steps, [*callbacks, *display])
    agent.save(run.final_checkpoint)
    return agent, evaluations.reports


def load_stages(run: RunFolder) -> list[GTrXLPPO]:
    """Load the checkpoints after the first quarter of training, the last one first.

    In the first quarter, the agent acts almost randomly.
    """
    agents = [GTrXLPPO.load(path) for path in (run.path / STAGES).iterdir()]
    trained = [agent for agent in agents if 4 * agent.num_timesteps >= run.config["total_timesteps"]]
    return sorted(trained, key=lambda agent: -agent.num_timesteps)


def draw(folder: Path, curve: dict[int, Report], picture: Path) -> None:
    """Plot the success rate of evaluations, and below it return and entropy from the training log."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    upper.plot(list(curve), [report.success_rate for report in curve.values()], marker="o", label="GTrXL")
    upper.axhline(CHANCE, color="gray", linestyle="--", label="without memory: chance")
    upper.set(title="T-Maze, corridor of 50 steps", ylabel="success rate", ylim=(-0.03, 1.03))
    upper.legend(loc="lower right")
    lower.plot(*logged(folder, "rollout/ep_rew_mean"), label="return of an episode, while exploring")
    lower.plot(*logged(folder, "train/entropy_loss", sign=-1), label="entropy of the policy")
    lower.set(xlabel="environment steps")
    lower.legend(loc="lower right")
    figure.savefig(picture, dpi=120)


def logged(folder: Path, tag: str, sign: int = 1) -> tuple[list[int], list[float]]:
    """Return steps and values of a tag in progress.csv."""
    with open(folder / "progress.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(tag)]
    steps = [int(row["time/total_timesteps"]) for row in rows]
    return steps, [sign * float(row[tag]) for row in rows]


def scenes(agent: GTrXLPPO) -> Iterator[str]:
    """Yield text renderings of the beginning, the middle and the end of an episode."""
    frames = list(play(agent))
    for step in (0, len(frames) // 2, len(frames) - 2, len(frames) - 1):
        yield f"step {step}: {frames[step]}\n"


def play(agent: GTrXLPPO) -> Iterator[str]:
    """Play an episode; yield at each step the observation in words and the maze with agent A and goal G."""
    env = gymnasium.make(TASK, render_mode="ansi")
    obs, _ = env.reset(seed=0)
    state, over = None, False
    yield f"{describe_observation(obs)}\n{env.render()}"
    while not over:
        action, state = agent.predict(obs, state, deterministic=True)
        obs, _, over, _, _ = env.step(action)
        yield f"{describe_observation(obs)}\n{env.render()}"


def describe_observation(obs: Any) -> str:
    """Describe an observation of the T-Maze in words."""
    junction, hint = obs.astype(int)
    place = "the junction or an arm" if junction else "a corridor"
    return f"the agent sees {place}, " + ("no hint", "hint UP", "hint DOWN")[hint]
