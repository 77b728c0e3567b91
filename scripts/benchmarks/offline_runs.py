"""Runs of offline methods: training and evaluation of one agent, with its costs."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import hugging_face
from benchmarks.offline_methods import METHODS, Preset, scaled
from benchmarks.process_memory import peak_bytes, resident_bytes
from benchmarks.update_clock import UpdateClock
from rlxf import BehaviorCloning, evaluate
from rlxf.data import ReferenceScores, Trajectories, load_trajectories

DATA = "data"
"""Name of the episodes of the data in the place of a method."""


@dataclass(frozen=True)
class Job:
    """One agent of the comparison.

    Args:
        dataset: Minari id.
        method: a name in `METHODS`.
        preset: sizes of the agent.
        seed: random seed of the training.
        episodes: number of evaluation episodes.
    """

    dataset: str
    method: str
    preset: Preset
    seed: int
    episodes: int

    @property
    def key(self) -> str:
        """Key of the agent in a file of results; the sizes are those that its method uses."""
        method = METHODS[self.method]
        policy = "" if method.deterministic else "stochastic policy, "
        return (
            f"{self.dataset}, {self.method}, {method.sizes(self.preset)}, seed {self.seed}, {policy}"
            f"{self.episodes} episodes"
        )


@dataclass(frozen=True)
class Run:
    """Result of one agent, or the episodes of the data.

    Args:
        dataset: Minari id.
        method: a name in `METHODS`, or `DATA`.
        seed: random seed of the training.
        target: target return of the evaluation; None for methods without one.
        returns: undiscounted return of each evaluation episode.
        milliseconds: median CPU time of an update, with one thread.
        megabytes: peak memory of building and training the agent, without that of the process before.
        seconds: wall time of training and evaluation.
        references: returns with normalized scores 0 and 100; None if the data have none.
        validation_loss: loss of the last checkpoint on held-out episodes; None if there are none.
    """

    dataset: str
    method: str
    seed: int
    target: float | None
    returns: list[float]
    milliseconds: float
    megabytes: float
    seconds: float
    references: tuple[float, float] | None
    validation_loss: float | None = None

    @property
    def scores(self) -> NDArray[np.float64]:
        """Normalized score of each episode, or its return without reference scores."""
        returns = np.array(self.returns, np.float64)
        if self.references is None:
            return returns
        return ReferenceScores(*self.references, "the run").normalize(returns)


def measure(job: Job, venv: Path) -> Run:
    """Train and evaluate one agent.

    Args:
        job: the agent.
        venv: folder of the virtual environment of HF's model.
    """
    start, data = time.perf_counter(), load_trajectories(job.dataset)
    make = METHODS[job.method].train
    returns, target, seconds, memory, loss = ours(job, make, data) if make else theirs(job, data, venv)
    warm = seconds[len(seconds) // 10 :]
    return Run(
        job.dataset,
        job.method,
        job.seed,
        target,
        returns,
        1000 * median(warm),
        memory / 1e6,
        time.perf_counter() - start,
        references_of(data),
        loss,
    )


def measure_data(dataset: str) -> Run:
    """Return the returns of the episodes in the data, as a run without seed, target and cost."""
    data = load_trajectories(dataset)
    return Run(dataset, DATA, 0, None, data.returns.astype(float).tolist(), 0, 0, 0, references_of(data))


def references_of(data: Trajectories) -> tuple[float, float] | None:
    """Return the returns with normalized scores 0 and 100; None if the data have none."""
    scores = data.reference_scores
    return None if scores is None else (scores.minimum, scores.maximum)


Outcome = tuple[list[float], float | None, list[float], int, float | None]
"""Returns, target return, CPU seconds of each update, peak memory in bytes, and validation loss."""


def ours(job: Job, make: Callable[[Trajectories, Preset, int], Any], data: Trajectories) -> Outcome:
    """Train and evaluate an agent of this package."""
    load_modules(data)
    clock, before = UpdateClock(time.process_time), resident_bytes()
    agent = make(data, job.preset, job.seed).learn(job.preset.updates, clock)
    memory = peak_bytes() - before
    target = highest_return(data) if agent.return_conditioned else None
    torch.manual_seed(job.seed)  # stochastic policies draw from the global generator
    returns = evaluated(agent, job.episodes, target, METHODS[job.method].deterministic)
    loss = None if agent.validation_fraction is None else agent.validation_losses()["loss"]
    return returns, target, clock.durations, memory, loss


def load_modules(data: Trajectories) -> None:
    """Make an update of a tiny agent, which loads the modules of a training before memory is measured."""
    BehaviorCloning(data, hidden_sizes=(1,), batch_size=1, seed=0, device="cpu").learn(1)


def theirs(job: Job, data: Trajectories, venv: Path) -> Outcome:
    """Train and evaluate HF's model on windows of the same kind."""
    target = highest_return(data)
    answer = hugging_face.run_task(
        venv,
        "train_and_evaluate",
        scaled(job.preset.transformer, data),
        dataset=job.dataset,
        updates=job.preset.updates,
        seed=job.seed,
        episodes=job.episodes,
        targets=[target],
    )
    (report,) = answer["targets"]
    return report["returns"], target, answer["update_seconds"], answer["bytes"], None


def highest_return(data: Trajectories) -> float:
    """Return the highest return of an episode, the target of methods that need one."""
    return float(data.returns.max())


def evaluated(agent: Any, episodes: int, target: float | None, deterministic: bool = True) -> list[float]:
    """Return the returns of an agent in the environment of its data; all agents get the same episodes."""
    env, targets = agent.make_env(episodes), None if target is None else [target]
    found: Any = evaluate(agent, env, episodes, target_returns=targets, deterministic=deterministic)
    env.close()
    report = found if target is None else found.first
    return [float(each) for each in np.asarray(report.returns)]
