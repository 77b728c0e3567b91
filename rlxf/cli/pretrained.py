"""The weights of a run, for an agent to begin with."""

from pathlib import Path
from typing import Any

from rlxf.agents.decision_transformer import DecisionTransformer
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.training import RunFolder

PRETRAINING = "pretraining"
"""As ``config.json`` names it."""
SOURCES: dict[str, Any] = {
    PRETRAINING: MaskedPretraining,
    "decision_transformer": DecisionTransformer,
    "gtrxl": GTrXLPPO,
}


def begin_with(agent: Any, folder: Path | None) -> None:
    """Give an agent the weights of the run in ``folder``; None: it keeps its own.

    Raises:
        OSError, ValueError: if there is no such run, it is of no kind known here, or its weights do not fit.
    """
    if folder is None:
        return
    run = RunFolder.open(folder)
    name = run.config.get("agent")
    if name not in SOURCES:
        raise ValueError(f"{run.path} is a run of {name!r}; known are {', '.join(SOURCES)}")
    agent.take_weights(SOURCES[name].load(run.checkpoint, device="cpu"))
