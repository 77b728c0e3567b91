"""A look at the agent at the end of some rollouts."""

from abc import abstractmethod

from stable_baselines3.common.callbacks import BaseCallback

from rlxf.agents.gtrxl.ppo import GTrXLPPO


class EveryRollouts(BaseCallback):
    """`look` at the first rollout of a training, at every so many after it and at the last.

    It looks before the rollout is learned from.

    Args:
        every: rollouts from one look to the next.

    Raises:
        ValueError: if ``every`` is less than 1.
        TypeError: before training starts, if the agent is no `GTrXLPPO`.
    """

    model: GTrXLPPO

    def __init__(self, every: int):
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        super().__init__()
        self.every = every

    def _init_callback(self) -> None:
        if not isinstance(self.model, GTrXLPPO):
            raise TypeError(
                f"{type(self).__name__} looks into a GTrXLPPO agent, got {type(self.model).__name__}"
            )

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        last = self.num_timesteps >= self.model._total_timesteps
        if last or self.model.iterations % self.every == 0:
            self.look()

    @abstractmethod
    def look(self) -> None:
        """Record what there is to see."""
