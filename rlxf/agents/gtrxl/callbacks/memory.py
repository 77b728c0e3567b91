"""What an agent takes of its memory, in numbers."""

from rlxf.agents.gtrxl.callbacks.every_rollouts import EveryRollouts
from rlxf.agents.gtrxl.callbacks.memory_use import mean_distance, share_of_memory
from rlxf.agents.gtrxl.callbacks.parameter_groups import group_of
from rlxf.agents.gtrxl.callbacks.reading import Reading

ENVIRONMENTS = 4
"""Those that the numbers are means of: enough for some hundred steps."""


class MemoryCallback(EveryRollouts):
    """Numbers for each layer, every so many rollouts, in the agent's log.

    - ``memory/layer_1/attention_on_memory``: share of attention that falls on steps before the segment.
    - ``memory/layer_1/attended_distance``: how many steps back attention goes in the mean.
    - ``memory/layer_1/attention_gate``, ``feed_forward_gate``: mean of z of the GRU gates behind the two
      sublayers: 0 passes the sublayer by, 1 replaces the stream. Not with other residuals.

    They are means over heads and steps of the last segments of the first 4 environments.

    Args:
        every: rollouts from one to the next: by default 10.
    """

    def __init__(self, every: int = 10):
        super().__init__(every)

    def look(self) -> None:
        """Record the numbers."""
        reading = Reading.last(self.model.policy, self.model.rollout_buffer, ENVIRONMENTS)
        for number, weights in enumerate(reading.weights, start=1):
            tag = f"memory/layer_{number}"
            self.logger.record(f"{tag}/attention_on_memory", share_of_memory(weights))
            self.logger.record(f"{tag}/attended_distance", mean_distance(weights, reading.relation.distance))
        for gate, openness in reading.openness.items():
            self.logger.record(f"memory/{group_of(gate)}", openness.mean().item())
