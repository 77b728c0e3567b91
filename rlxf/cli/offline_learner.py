"""Options of training on datasets."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rlxf.agents.decision_transformer.objectives import OBJECTIVES
from rlxf.cli.counts import Count
from rlxf.training import parse_schedule


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Options of AdamW and of the windows of the data."""

    context_length: Count = 20
    """Context length in environment steps, including the current one."""
    batch_size: Count = 64
    """Number of windows per update."""
    learning_rate: str = "0.0001"
    """Learning rate of AdamW over the training: NUMBER, linear:START:END or cosine:START:END."""
    weight_decay: float = 1e-4
    """Weight decay coefficient of AdamW."""
    warmup_updates: Count | None = None
    """Number of updates in which the learning rate rises from 0. None means a tenth of the training."""
    max_grad_norm: float = 0.25
    """Maximum norm of the gradient; larger gradients are clipped."""
    return_scale: float | None = None
    """Divisor of returns. None means the standard deviation of the returns-to-go in the data."""
    episode_length: Count | None = None
    """Number of time steps with an embedding. None means the longest episode of the data."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the tensors. "auto" selects the GPU if there is one."""

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of the agent or of the pretraining."""
        return asdict(self) | {"learning_rate": parse_schedule(self.learning_rate)}


@dataclass(frozen=True, kw_only=True)
class OfflineLearner(WindowOptions):
    """`WindowOptions` and the training objective."""

    objective: Literal["Imitation", "MaximumEntropy"] = "Imitation"
    """Training objective. MaximumEntropy trains a stochastic policy, which can be finetuned online."""

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of the agent.

        Raises:
            ValueError: if the objective is unknown, e.g. in a ``config.json``.
        """
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")
        return super().arguments() | {"objective": OBJECTIVES[self.objective]()}
