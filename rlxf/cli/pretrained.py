"""Initialization of an agent with the weights of a run."""

from pathlib import Path
from typing import Any

from rlxf.agents.decision_transformer import DecisionTransformer
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.training import RunFolder

PRETRAINING = "pretraining"
"""Name of a pretraining in ``config.json``."""
SOURCES: dict[str, Any] = {
    PRETRAINING: MaskedPretraining,
    "decision_transformer": DecisionTransformer,
    "gtrxl": GTrXLPPO,
}


def begin_with(agent: Any, folder: Path | None) -> None:
    """Load the weights of the run in ``folder`` into an agent; do nothing if ``folder`` is None.

    Raises:
        OSError, ValueError: if the run does not exist, its agent is unknown, or its weights do not fit.
    """
    if folder is None:
        return
    run = RunFolder.open(folder)
    name = run.config.get("agent")
    if name not in SOURCES:
        raise ValueError(f"{run.path} is a run of agent {name!r}; supported agents are {', '.join(SOURCES)}")
    agent.take_weights(SOURCES[name].load(run.checkpoint, device="cpu"))
