"""Base class of callbacks that record diagnostics every N rollouts."""

from abc import abstractmethod

from stable_baselines3.common.callbacks import BaseCallback

from rlxf.agents.gtrxl.ppo import GTrXLPPO


class EveryRollouts(BaseCallback):
    """Callback that calls `look` at the first rollout of a training, at every N-th after it and at the last.

    `look` is called at the end of a rollout, before its update.

    Args:
        every: rollouts N between two calls.

    Raises:
        ValueError: if ``every`` is less than 1.
        TypeError: before training starts, if the agent is not a `GTrXLPPO`.
    """

    model: GTrXLPPO

    def __init__(self, every: int):
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        super().__init__()
        self.every = every

    def _init_callback(self) -> None:
        if not isinstance(self.model, GTrXLPPO):
            raise TypeError(f"{type(self).__name__} needs a GTrXLPPO agent, got {type(self.model).__name__}")

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        last = self.num_timesteps >= self.model._total_timesteps
        if last or self.model.iterations % self.every == 0:
            self.look()

    @abstractmethod
    def look(self) -> None:
        """Record the diagnostics."""
