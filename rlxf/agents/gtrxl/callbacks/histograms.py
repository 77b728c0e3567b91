"""Callback that writes histograms of weights, gradients and rollout data to TensorBoard."""

import math

import torch
from torch import Tensor

from rlxf.agents.gtrxl.callbacks.every_rollouts import EveryRollouts
from rlxf.agents.gtrxl.callbacks.parameter_groups import parameter_groups
from rlxf.training.tensorboard import record_for_tensorboard, writes_tensorboard

SAMPLE = 10_000
"""Largest number of values in a histogram; more cost time without a visible difference."""
LARGEST = 1e19
"""Largest absolute value that TensorBoard's bins cover."""


class HistogramCallback(EveryRollouts):
    """Write histograms to TensorBoard every ``every`` rollouts.

    - ``weights/GROUP`` for each group of `parameter_groups`, e.g. ``weights/layer_1/attention_gate``.
    - ``gradients/GROUP``: gradients of the last minibatch, clipped to ``max_grad_norm``. The first rollout
      has none, since it precedes the first update.
    - ``rollout/advantages`` before normalisation, ``rollout/values`` and ``rollout/actions`` as sampled, with
      all components in one histogram: over all steps of the rollout.

    Each histogram has at most 10,000 evenly spaced values. NaN and infinite values are left out.

    Args:
        every: rollouts between two histograms; default 20.
    """

    def __init__(self, every: int = 20):
        super().__init__(every)

    def look(self) -> None:
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
        numbers = sample(parts, SAMPLE) if parts else torch.empty(0)
        numbers = numbers[numbers.abs() < LARGEST]
        if len(numbers):
            record_for_tensorboard(self.logger, tag, numbers.cpu())


def sample(parts: list[Tensor], size: int) -> Tensor:
    """Return at most ``size`` evenly spaced values of some tensors, as float (N,)."""
    flat = torch.cat([part.flatten() for part in parts])
    return flat[:: max(1, math.ceil(len(flat) / size))].float()
