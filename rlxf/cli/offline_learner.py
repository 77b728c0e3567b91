"""The options of learning from data."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rlxf.agents.decision_transformer.objectives import OBJECTIVES
from rlxf.cli.counts import Count
from rlxf.training import parse_schedule


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """AdamW on windows of the data."""

    context_length: Count = 20
    """Steps that the agent sees, the present one included."""
    batch_size: Count = 64
    """Windows in an update."""
    learning_rate: str = "0.0001"
    """AdamW's, a schedule: a number, linear:START:END or cosine:START:END, over the training."""
    weight_decay: float = 1e-4
    """How much AdamW lets the weights decay."""
    warmup_updates: Count | None = None
    """Updates over which the rate rises from 0; None is a tenth of all."""
    max_grad_norm: float = 0.25
    """Largest norm of the gradient."""
    return_scale: float | None = None
    """What returns are divided by; None is the deviation of the returns to go in the data."""
    episode_length: Count | None = None
    """Time steps with an embedding of their own; None is the longest episode of the data."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes the GPU if there is one."""

    def arguments(self) -> dict[str, Any]:
        """These options as arguments of what learns."""
        return asdict(self) | {"learning_rate": parse_schedule(self.learning_rate)}


@dataclass(frozen=True, kw_only=True)
class OfflineLearner(WindowOptions):
    """AdamW on windows of the data, towards an objective."""

    objective: Literal["Imitation", "MaximumEntropy"] = "Imitation"
    """What is minimised. MaximumEntropy gives a stochastic policy, which can go on learning online."""

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of the agent.

        Raises:
            ValueError: if the objective is unknown, e.g. in a ``config.json``.
        """
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")
        return super().arguments() | {"objective": OBJECTIVES[self.objective]()}
