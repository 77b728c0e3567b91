"""Callback that logs how much the policy uses its memory."""

from torch import Tensor

from rlxf.agents.gtrxl.callbacks.base import RolloutCallback, SegmentInspection
from rlxf.agents.gtrxl.callbacks.histograms import group_of


def memory_attention_share(weights: Tensor) -> float:
    """Share of all attention on the memory, from 0 to 1.

    Args:
        weights: attention weights (B, H, T, M + T), with the M keys of the memory first.
    """
    memory = weights.shape[-1] - weights.shape[-2]
    return (weights[..., :memory].sum() / weights.sum()).item()


def mean_attention_distance(weights: Tensor, distance: Tensor) -> float:
    """Mean attention distance in steps, ``sum_ij w_ij d_ij / sum_ij w_ij``.

    Args:
        weights: attention weights w, (B, H, T, M + T).
        distance: d, (B, T, M + T), position of the query minus position of the key.
    """
    return ((weights * distance[:, None]).sum() / weights.sum()).item()


ENVIRONMENTS = 4
"""Number of environments that the metrics average over: enough for some hundred steps."""


class MemoryCallback(RolloutCallback):
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

    def record(self) -> None:
        """Record the metrics."""
        reading = SegmentInspection.last(self.model.policy, self.model.rollout_buffer, ENVIRONMENTS)
        for number, weights in enumerate(reading.weights, start=1):
            tag = f"memory/layer_{number}"
            self.logger.record(f"{tag}/attention_on_memory", memory_attention_share(weights))
            self.logger.record(
                f"{tag}/attended_distance", mean_attention_distance(weights, reading.relation.distance)
            )
        for gate, activation in reading.gate_activations.items():
            self.logger.record(f"memory/{group_of(gate)}", activation.mean().item())
