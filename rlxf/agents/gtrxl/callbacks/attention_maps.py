"""Where an agent looks, as a picture."""

from stable_baselines3.common.logger import Figure

from rlxf.agents.gtrxl.callbacks.attention_figure import attention_figure
from rlxf.agents.gtrxl.callbacks.every_rollouts import EveryRollouts
from rlxf.agents.gtrxl.callbacks.reading import Reading
from rlxf.attention.index import EMPTY
from rlxf.training.tensorboard import record_for_tensorboard, writes_tensorboard


class AttentionMapCallback(EveryRollouts):
    """Attention maps among TensorBoard's images, every so many rollouts: tag ``attention/maps``.

    The last segment of the first environment is read as it is learned from, with memory before it.
    For each layer and head the picture shows what each step takes of each step before it.

    Args:
        every: rollouts from one picture to the next. A picture costs as much as half a rollout of a
            small network: by default 100.
    """

    def __init__(self, every: int = 100):
        super().__init__(every)

    def look(self) -> None:
        """Record the picture, if there is a TensorBoard log to show it."""
        if not writes_tensorboard(self.logger):
            return
        reading = Reading.last(self.model.policy, self.model.rollout_buffer, environments=1)
        relation = reading.relation
        starts = (relation.key.position == 0) & (relation.key.episode != EMPTY)
        figure = attention_figure([layer[0] for layer in reading.weights], relation.allowed[0], starts[0])
        record_for_tensorboard(self.logger, "attention/maps", Figure(figure, close=False))
