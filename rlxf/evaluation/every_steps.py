"""Base class of callbacks that act at regular intervals of training steps."""

from abc import abstractmethod

from stable_baselines3.common.callbacks import BaseCallback


class EverySteps(BaseCallback):
    """Callback that calls `act` every ``every_steps`` training steps, counted from step 0 of the agent.

    Args:
        every_steps: interval between calls, in environment steps over all environments.

    Raises:
        ValueError: if every_steps is less than 1.
    """

    def __init__(self, every_steps: int):
        if every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, got {every_steps}")
        super().__init__()
        self.every_steps = every_steps
        self._due = every_steps

    def _on_training_start(self) -> None:
        self._due = self._next_due()

    def _on_step(self) -> bool:
        if self.num_timesteps >= self._due:
            self._due = self._next_due()
            self.act()
        return True

    def _next_due(self) -> int:
        return (self.num_timesteps // self.every_steps + 1) * self.every_steps

    @abstractmethod
    def act(self) -> None:
        """Perform the action of the callback."""
