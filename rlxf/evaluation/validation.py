"""Callback that measures the loss on held-out episodes and saves the agent with the lowest one."""

from pathlib import Path
from typing import Any

from rlxf.evaluation.periodic import SelectingCallback
from rlxf.evaluation.report import write_scalars


class BestValidationCallback(SelectingCallback):
    """Measure the validation loss at regular intervals, log it, and save the agent with the lowest one.

    The agent is trained offline with a ``validation_fraction``: its ``validation_losses`` need no
    environment. They are logged as ``validation/loss`` and so on. The measurement does not affect the
    training. Use the callback in ``learn``: `DecisionTransformer.learn_online` trains on a replay buffer that
    may contain the held-out episodes.

    A low loss means good predictions of the actions in the data, including those of bad episodes. It shows
    overfitting and failed training, but it is no estimate of the return.

    Args:
        every_steps: updates between two measurements.
        best_path: path at which the agent is saved after each new lowest loss; None to save nothing.

    Attributes:
        losses: "loss" of each measurement, by the number of updates before it. Those of an earlier training
            are removed when a new one begins.
        best: lowest loss so far; None before the first measurement.
        best_step: number of updates before it; None before the first measurement.

    Raises:
        TypeError: if every_steps is not a number.
        ValueError: if every_steps is less than 1; before training, if the agent holds out no episodes.
    """

    def __init__(self, every_steps: int = 1_000, best_path: str | Path | None = None):
        super().__init__(every_steps, "min", best_path)
        self.losses: dict[int, float] = {}

    def _on_training_start(self) -> None:
        if getattr(self.model, "validation_fraction", None) is None:
            raise ValueError(
                f"BestValidationCallback needs an agent that holds out episodes, got "
                f"{type(self.model).__name__} without validation_fraction: build it with "
                f"validation_fraction=0.1"
            )
        super()._on_training_start()

    def reset(self) -> None:
        """Discard the losses of an earlier training."""
        super().reset()
        self.losses.clear()

    def on_interval(self) -> int:
        """Measure and log; save the agent if its loss is the lowest finite one so far."""
        agent: Any = self.model
        losses: dict[str, float] = agent.validation_losses()
        write_scalars(
            {f"validation/{name}": loss for name, loss in losses.items()}, self.logger, self.num_timesteps
        )
        self.losses[self.num_timesteps] = losses["loss"]
        self.select(losses["loss"])
        return 0

    def expected_steps(self) -> float:
        """Return 0: no environment is used."""
        return 0.0
