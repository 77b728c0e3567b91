"""Second half: a Decision Transformer learns from what was recorded, and is asked for returns."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from stable_baselines3.common.type_aliases import PolicyPredictor

from demonstration.remembering import CORRIDOR, TASK
from rlxf import DecisionTransformer, collect
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.attention import XL, TransformerSpec
from rlxf.envs.trajectories import load_trajectories
from rlxf.evaluation import Report
from rlxf.training import RunFolder, linear

DATASET = "demo/tmaze-v0"
RANDOM_SHARES = (0.0, 0.02)
"""Each stage plays half of its episodes as it is, half with 2% of its actions drawn at random."""
TARGETS = (1.0, -0.2, -0.4, -0.6, -0.8)
"""The goal's arm; the first wrong step with a fifth of the way to go, with two fifths and so on.

Not 0, the other arm: one episode in twenty goes there, which is too few to learn it from.
"""
CONTEXT = 17
"""A third of the episode; the memory holds the rest."""


def keep_datasets_in(folder: Path) -> None:
    """Have Minari's datasets, and what is converted from them, in this folder: for the whole process."""
    folder.mkdir(parents=True)
    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    os.environ["RLXF_CACHE"] = str(folder / ".cache")


def record(stages: Sequence[PolicyPredictor], episodes: int, seed: int) -> Report:
    """Record agents of all skills into `DATASET`, and give the returns that it holds."""
    collect(stages, TASK, DATASET, episodes, mix=RANDOM_SHARES, n_envs=64, seed=seed, progress_bar=True)
    data = load_trajectories(DATASET)
    return Report(data.returns.astype(np.float64), data.lengths)


def make_run(path: Path, updates: int, seed: int) -> RunFolder:
    """The folder of the run, which "rlxf evaluate" can open too."""
    config = {
        "agent": "decision_transformer",
        "dataset": [DATASET],
        "env": TASK,
        "program": "scripts/demo.sh",
    }
    return RunFolder.create(path, config | {"updates": updates, "seed": seed})


def train(run: RunFolder) -> DecisionTransformer:
    """The agent that learned from the recorded dataset, saved."""
    agent = DecisionTransformer(
        DATASET,
        CONTEXT,
        learning_rate=linear(2e-3, 0.0),
        batch_size=16,
        core=remembering_core(),
        seed=run.config["seed"],
    )
    agent.set_logger(run.make_logger())
    agent.learn(run.config["updates"], progress_bar=True)
    agent.save(run.checkpoint)
    return agent


def remembering_core() -> TransformerSpec:
    """A small one whose memory reaches from the junction back to the hint: three tokens for each step."""
    small = decision_transformer(width=64, layers=1, heads=4, dropout=0.0)
    return replace(small, memory=XL(3 * CORRIDOR))
