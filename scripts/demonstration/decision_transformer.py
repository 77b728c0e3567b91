"""Second part of the demo: train a Decision Transformer on recorded episodes, with target returns."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from stable_baselines3.common.type_aliases import PolicyPredictor

from demonstration.gtrxl import CORRIDOR, TASK
from rlxf import DecisionTransformer, collect
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.attention import XL, TransformerSpec
from rlxf.cli.progress import OFFLINE_METRICS, progress
from rlxf.data import load_trajectories
from rlxf.evaluation import Report
from rlxf.training import RunFolder, linear

DATASET = "demo/tmaze-v0"
RANDOM_SHARES = (0.0, 0.02)
"""Shares of random actions; each checkpoint plays an equal part of its episodes with each share."""
TARGETS = (1.0, -0.2, -0.4, -0.6, -0.8)
"""Target returns: the arm of the goal; a first wrong step with a fifth of the corridor left, two fifths etc.

0, the return of the other arm, is left out: too few episodes, one in twenty, have it.
"""
CONTEXT = 17
"""Context length in steps: a third of the episode; the memory covers the rest."""


def set_dataset_folder(folder: Path) -> None:
    """Set the folder of Minari datasets and of their converted caches, for this process."""
    folder.mkdir(parents=True)
    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    os.environ["RLXF_CACHE"] = str(folder / ".cache")


def record(stages: Sequence[PolicyPredictor], episodes: int, seed: int) -> Report:
    """Record episodes of all agents into `DATASET`, and return a report of its returns."""
    collect(stages, TASK, DATASET, episodes, mix=RANDOM_SHARES, n_envs=64, seed=seed, progress_bar=True)
    data = load_trajectories(DATASET)
    return Report(data.returns.astype(np.float64), data.lengths)


def create_run(path: Path, updates: int, seed: int) -> RunFolder:
    """Create the run folder, which "rlxf evaluate" can open."""
    config = {
        "agent": "decision_transformer",
        "dataset": [DATASET],
        "env": TASK,
        "program": "scripts/demo.sh",
    }
    return RunFolder.create(path, config | {"updates": updates, "seed": seed})


def train(run: RunFolder) -> DecisionTransformer:
    """Train an agent on the recorded dataset, save it and return it."""
    agent = DecisionTransformer(
        DATASET,
        CONTEXT,
        learning_rate=linear(2e-3, 0.0),
        batch_size=16,
        core=long_memory_core(),
        seed=run.config["seed"],
    )
    agent.set_logger(run.make_logger())
    updates = run.config["updates"]
    with progress(True, "updates", updates, OFFLINE_METRICS) as display:
        agent.learn(updates, display, log_interval=min(100, updates))
    agent.save(run.final_checkpoint)
    return agent


def long_memory_core() -> TransformerSpec:
    """Return a small core whose memory spans the corridor: three tokens for each step."""
    small = decision_transformer(width=64, layers=1, heads=4, dropout=0.0)
    return replace(small, memory=XL(3 * CORRIDOR))
