"""Callback that writes attention maps to TensorBoard."""

from stable_baselines3.common.logger import Figure

from rlxf.agents.gtrxl.callbacks.attention_figure import attention_figure
from rlxf.agents.gtrxl.callbacks.every_rollouts import EveryRollouts
from rlxf.agents.gtrxl.callbacks.reading import Reading
from rlxf.attention.index import EMPTY
from rlxf.training.tensorboard import record_for_tensorboard, writes_tensorboard


class AttentionMapCallback(EveryRollouts):
    """Write attention maps to TensorBoard's images every ``every`` rollouts: tag ``attention/maps``.

    The plot shows the attention weights of each layer and head for the last segment of the first environment,
    read with its memory as in training.

    Args:
        every: rollouts between two plots; default 100. A plot costs as much time as half a rollout of a small
            network.
    """

    def __init__(self, every: int = 100):
        super().__init__(every)

    def look(self) -> None:
        """Record the plot, if the logger writes TensorBoard events."""
        if not writes_tensorboard(self.logger):
            return
        reading = Reading.last(self.model.policy, self.model.rollout_buffer, environments=1)
        relation = reading.relation
        starts = (relation.key.position == 0) & (relation.key.episode != EMPTY)
        figure = attention_figure([layer[0] for layer in reading.weights], relation.allowed[0], starts[0])
        record_for_tensorboard(self.logger, "attention/maps", Figure(figure, close=False))
