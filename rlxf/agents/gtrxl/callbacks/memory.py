"""Callback that logs how much an agent attends to its memory."""

from rlxf.agents.gtrxl.callbacks.every_rollouts import EveryRollouts
from rlxf.agents.gtrxl.callbacks.memory_use import mean_distance, share_of_memory
from rlxf.agents.gtrxl.callbacks.parameter_groups import group_of
from rlxf.agents.gtrxl.callbacks.reading import Reading

ENVIRONMENTS = 4
"""Number of environments that the metrics average over: enough for some hundred steps."""


class MemoryCallback(EveryRollouts):
    """Log memory metrics of each layer every ``every`` rollouts.

    - ``memory/layer_1/attention_on_memory``: share of attention on steps before the segment.
    - ``memory/layer_1/attended_distance``: mean distance of attention, in steps before the query.
    - ``memory/layer_1/attention_gate``, ``feed_forward_gate``: mean of z of the GRU gates after the two
      sublayers: 0 ignores the sublayer, 1 replaces the residual stream. Only with `GRUGate`.

    The metrics are means over heads and steps of the last segments of the first 4 environments.

    Args:
        every: rollouts between two records; default 10.
    """

    def __init__(self, every: int = 10):
        super().__init__(every)

    def look(self) -> None:
        """Record the metrics."""
        reading = Reading.last(self.model.policy, self.model.rollout_buffer, ENVIRONMENTS)
        for number, weights in enumerate(reading.weights, start=1):
            tag = f"memory/layer_{number}"
            self.logger.record(f"{tag}/attention_on_memory", share_of_memory(weights))
            self.logger.record(f"{tag}/attended_distance", mean_distance(weights, reading.relation.distance))
        for gate, openness in reading.openness.items():
            self.logger.record(f"memory/{group_of(gate)}", openness.mean().item())
