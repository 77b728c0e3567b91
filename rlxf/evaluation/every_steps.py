"""Something done every so many steps of training."""

from abc import abstractmethod

from stable_baselines3.common.callbacks import BaseCallback


class EverySteps(BaseCallback):
    """Calls `act` each time so many more steps are trained, counted from step 0 of the agent.

    Args:
        every_steps: environment steps, over all environments, from one call to the next.

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
        """What is to be done."""
