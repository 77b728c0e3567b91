"""Histograms of weights, gradients and what a rollout brought."""

import math

import torch
from torch import Tensor

from rlxf.agents.gtrxl.callbacks.every_rollouts import EveryRollouts
from rlxf.agents.gtrxl.callbacks.parameter_groups import parameter_groups
from rlxf.training.tensorboard import record_for_tensorboard, writes_tensorboard

SAMPLE = 10_000
"""Numbers that a histogram is made of: more would cost time and change nothing that one sees."""
LARGEST = 1e19
"""Beyond it are none of TensorBoard's bins."""


class HistogramCallback(EveryRollouts):
    """Histograms in TensorBoard, every so many rollouts.

    - ``weights/GROUP``, for the groups of `parameter_groups`: ``weights/layer_1/attention_gate``.
    - ``gradients/GROUP``: of the last minibatch, as the optimiser took them: shortened to
      ``max_grad_norm``. Not in the first rollout, before anything was learned.
    - ``rollout/advantages`` before they are normalised, ``rollout/values``, ``rollout/actions`` as they
      were sampled, all components together: over all steps of the rollout.

    Of each at most 10,000 numbers are taken, evenly spread. NaN and infinite ones are left out.

    Args:
        every: rollouts from one to the next: by default 20.
    """

    def __init__(self, every: int = 20):
        super().__init__(every)

    def look(self) -> None:
        """Record all of them, if there is a TensorBoard log to show them."""
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
    """At most ``size`` of the numbers of some tensors, evenly spread, as float (N,)."""
    flat = torch.cat([part.flatten() for part in parts])
    return flat[:: max(1, math.ceil(len(flat) / size))].float()
