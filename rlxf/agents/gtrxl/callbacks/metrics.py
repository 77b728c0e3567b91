"""Callbacks that log memory metrics, and histograms of weights, gradients and rollouts."""

import math
import re
from collections import defaultdict

import torch
from torch import Tensor, nn

from rlxf.agents.gtrxl.callbacks.base import RolloutCallback, SegmentInspection
from rlxf.training.resumed_logger import record_for_tensorboard, writes_tensorboard

OUTSIDE_OF_LAYERS = {
    "features_extractor": "features",
    "action_token": "token",
    "embedding": "position_embedding",
    "norm": "final_norm",
    "action_net": "action_head",
    "value_net": "value_head",
    "reconstruction_net": "reconstruction_head",
}


def parameter_groups(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of a policy by group, see `group_of`."""
    groups = defaultdict(list)
    for name, parameter in module.named_parameters():
        groups[group_of(name)].append(parameter)
    return dict(groups)


def group_of(name: str) -> str:
    """Return the group of a parameter.

    For example, ``transformer.blocks.0.attention_norm.residual.w`` is in ``layer_1/attention_gate``. The
    groups of a layer are attention, feed_forward, the gate of each, and norms. Outside of the layers a group
    is a module of the policy, e.g. ``value_head``.
    """
    name = name.removeprefix("transformer.")
    layer = re.match(r"blocks\.(\d+)\.(\w+)\.(\w+)", name)
    if layer is None:
        part = name.split(".")[0]
        return OUTSIDE_OF_LAYERS.get(part, part)
    number, sublayer, part = layer.groups()
    gate = f"{sublayer.removesuffix('_norm')}_gate"
    return f"layer_{int(number) + 1}/{ {'norm': 'norms', 'residual': gate}.get(part, sublayer) }"


SAMPLE = 10_000
"""Largest number of values in a histogram; more cost time without a visible difference."""
LARGEST = 1e19
"""Largest absolute value that TensorBoard's bins cover."""


class HistogramCallback(RolloutCallback):
    """Write histograms to TensorBoard every ``every`` rollouts.

    - ``weights/GROUP`` for each group of `parameter_groups`, e.g. ``weights/layer_1/attention_gate``.
    - ``gradients/GROUP``: gradients of the last minibatch, clipped to ``max_grad_norm``. The first rollout
      has none, since it precedes the first update.
    - ``rollout/advantages`` before normalization, ``rollout/values``, and ``rollout/actions`` as sampled,
      over all steps of the rollout. All components of actions are in one histogram.

    Each histogram has at most 10,000 evenly spaced values. NaN and infinite values are left out.

    Args:
        every: rollouts between two histograms; default 20.
    """

    def __init__(self, every: int = 20):
        super().__init__(every)

    def record(self) -> None:
        """Record all histograms, if the logger writes TensorBoard events."""
        if not writes_tensorboard(self.logger):
            return
        for group, parameters in parameter_groups(self.model.policy).items():
            self._record(f"weights/{group}", [parameter.detach() for parameter in parameters])
            self._record(f"gradients/{group}", [p.grad for p in parameters if p.grad is not None])
        buffer = self.model.rollout_buffer
        real = buffer.weight == 1
        for name in ("advantages", "values", "actions"):
            self._record(f"rollout/{name}", [getattr(buffer, name)[real]])

    def _record(self, tag: str, parts: list[Tensor]) -> None:
        numbers = subsample(parts, SAMPLE) if parts else torch.empty(0)
        numbers = numbers[numbers.abs() < LARGEST]
        if len(numbers):
            record_for_tensorboard(self.logger, tag, numbers.cpu())


def subsample(parts: list[Tensor], size: int) -> Tensor:
    """Return at most ``size`` evenly spaced values of some tensors, as float (N,)."""
    flat = torch.cat([part.flatten() for part in parts])
    return flat[:: max(1, math.ceil(len(flat) / size))].float()


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
      sublayers: 0 skips the sublayer, 1 replaces the residual stream. Only with `GRUGate`.

    The metrics are means over heads and steps of the last segments of the first 4 environments.

    Args:
        every: rollouts between two records; default 10.
    """

    def __init__(self, every: int = 10):
        super().__init__(every)

    def record(self) -> None:
        """Record the metrics."""
        segments = SegmentInspection.from_buffer(self.model.policy, self.model.rollout_buffer, ENVIRONMENTS)
        for number, weights in enumerate(segments.weights, start=1):
            tag = f"memory/layer_{number}"
            self.logger.record(f"{tag}/attention_on_memory", memory_attention_share(weights))
            self.logger.record(
                f"{tag}/attended_distance", mean_attention_distance(weights, segments.relation.distance)
            )
        for gate, activation in segments.gate_activations.items():
            self.logger.record(f"memory/{group_of(gate)}", activation.mean().item())
