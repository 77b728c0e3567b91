"""Agents with a TensorBoard log, and access to its events."""

from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import configure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import GTrXLPPO
from tests.agents.gtrxl.worlds import scripts, shifted, small_agent

N_STEPS, N_ENVS = 16, 3
ROLLOUT = N_STEPS * N_ENVS
EVERYTHING = {"histograms": 0, "images": 0, "scalars": 0}


def learner(folder: Path, formats: tuple[str, ...] = ("tensorboard",), **changes: Any) -> GTrXLPPO:
    """Return a small agent that logs to a folder."""
    agent = small_agent(changes.pop("env", None) or scripts(shifted(N_ENVS)), **changes)
    agent.set_logger(configure(str(folder), list(formats)))
    return agent


def events(folder: Path) -> EventAccumulator:
    """Load all logged events."""
    return EventAccumulator(str(folder), size_guidance=EVERYTHING).Reload()
