"""Callbacks that write diagnostics of an agent to TensorBoard: memory metrics, histograms, attention maps."""

import math
from abc import abstractmethod

import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Figure as LoggedFigure
from torch import Tensor

from rlxf.agents.common.attention_figure import Segments, attention_figure, segment_weights
from rlxf.agents.common.parameter_groups import group_of, parameter_groups
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.ppo import GTrXLPPO
from rlxf.agents.gtrxl.rollout_buffer import SegmentBuffer
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.inspection import gate_activations
from rlxf.attention.token_index import EMPTY
from rlxf.utils.checks import as_whole_number
from rlxf.utils.tensorboard import record_for_tensorboard, writes_tensorboard


class RolloutCallback(BaseCallback):
    """Callback that calls `record` at the first rollout of training, at every N-th after it and at the
    last.

    `record` is called at the end of a rollout, before its update.

    Args:
        every_rollouts: rollouts N between two calls.

    Raises:
        ValueError: if ``every_rollouts`` is less than 1 or has a fraction.
        TypeError: if ``every_rollouts`` is not a number; before training starts, if the agent is not a
            `GTrXLPPO`.
    """

    model: GTrXLPPO

    def __init__(self, every_rollouts: int):
        super().__init__()
        self.every_rollouts = as_whole_number("every_rollouts", every_rollouts)

    def _init_callback(self) -> None:
        if not isinstance(self.model, GTrXLPPO):
            raise TypeError(f"{type(self).__name__} needs a GTrXLPPO agent, got {type(self.model).__name__}")

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        last = self.num_timesteps >= self.model._total_timesteps
        if last or self.model.iterations % self.every_rollouts == 0:
            self.record()

    @abstractmethod
    def record(self) -> None:
        """Record the diagnostics."""


def last_segments(policy: GTrXLPolicy, buffer: SegmentBuffer, environments: int) -> Segments:
    """Return the last segments of the first ``environments`` environments of a rollout."""
    per_environment = buffer.n_steps // buffer.segment_length
    first = torch.arange(min(environments, buffer.n_envs))
    batch = buffer.segments((first + 1) * per_environment - 1, buffer.advantages)
    with torch.no_grad():
        tokens = policy.tokens(batch.obs, batch.previous).unflatten(0, tuple(batch.index.shape))
    return policy.transformer, tokens, batch.index, batch.state


def segment_mask(segments: Segments) -> AttentionMask:
    """Return attention mask and distances between the T queries of segments and their M + T keys."""
    transformer, _, index, state = segments
    key = index if state is None else state.index.concatenate(index)
    return transformer.attention_mask(index, key)


def memory_attention_fraction(weights: Tensor) -> float:
    """Fraction of all attention on the memory, from 0 to 1.

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
"""Number of environments that the metrics average over; their segments have a few hundred steps in total."""


class MemoryCallback(RolloutCallback):
    """Log memory metrics of each layer every ``every_rollouts`` rollouts.

    - ``memory/layer_1/attention_on_memory``: fraction of attention on steps before the segment.
    - ``memory/layer_1/attended_distance``: mean distance of attention, in steps before the query.
    - ``memory/layer_1/attention_gate``, ``feed_forward_gate``, only with `GRUGate` and `HighwayGate`: mean
      update gate after the two sublayers. 0 skips the sublayer, 1 replaces the residual stream. A recurrent
      layer has the gate of its mixer in place of the first one, and no metrics of attention.

    The metrics are means over heads and steps of the last segments of the first 4 environments.

    Args:
        every_rollouts: rollouts between two records; default 10.
    """

    def __init__(self, every_rollouts: int = 10):
        super().__init__(every_rollouts)

    def record(self) -> None:
        """Record the metrics."""
        segments = last_segments(self.model.policy, self.model.rollout_buffer, ENVIRONMENTS)
        distance = segment_mask(segments).distance
        for layer, weights in segment_weights(segments).items():
            tag = f"memory/layer_{layer}"
            self.logger.record(f"{tag}/attention_on_memory", memory_attention_fraction(weights))
            self.logger.record(f"{tag}/attended_distance", mean_attention_distance(weights, distance))
        for gate, activation in gate_activations(*segments).items():
            self.logger.record(f"memory/{group_of(gate)}", activation.mean().item())


HISTOGRAM_VALUES = 10_000
"""Maximum number of values in a histogram; more values would take time without a visible difference."""
MAX_BINNED_VALUE = 1e19
"""Largest absolute value that TensorBoard's bins cover."""


class HistogramCallback(RolloutCallback):
    """Write histograms to TensorBoard every ``every_rollouts`` rollouts.

    - ``weights/GROUP`` for each group of `parameter_groups`, e.g. ``weights/layer_1/attention_gate``.
    - ``gradients/GROUP``: gradients of the last minibatch, clipped to ``max_grad_norm``. The first rollout
      has none, since it precedes the first update.
    - ``rollout/advantages`` before normalization, ``rollout/values``, and ``rollout/actions`` as sampled,
      over all steps of the rollout. All components of actions are in one histogram.

    Each histogram has at most 10,000 evenly spaced values. Values that are NaN, infinite,
    or at least 1e19 in magnitude are left out.

    Args:
        every_rollouts: rollouts between two histograms; default 20.
    """

    def __init__(self, every_rollouts: int = 20):
        super().__init__(every_rollouts)

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
        numbers = subsample(parts, HISTOGRAM_VALUES) if parts else torch.empty(0)
        numbers = numbers[numbers.abs() < MAX_BINNED_VALUE]
        if len(numbers):
            record_for_tensorboard(self.logger, tag, numbers.cpu())


def subsample(parts: list[Tensor], size: int) -> Tensor:
    """Return at most ``size`` evenly spaced values of some tensors, as float (N,)."""
    flat = torch.cat([part.flatten() for part in parts])
    return flat[:: max(1, math.ceil(len(flat) / size))].float()


class AttentionMapCallback(RolloutCallback):
    """Write attention maps to TensorBoard's images every ``every_rollouts`` rollouts, tag ``attention/maps``.

    The plot shows the attention weights of each layer and head for the last segment of the first environment,
    read with its memory as in training.

    Args:
        every_rollouts: rollouts between two plots; default 100. A plot costs as much time as half a rollout
            of a small network.
    """

    def __init__(self, every_rollouts: int = 100):
        super().__init__(every_rollouts)

    def record(self) -> None:
        """Record the plot, if the logger writes TensorBoard events and a layer has attention."""
        if not writes_tensorboard(self.logger) or not self.model.core.has_attention:
            return
        segments = last_segments(self.model.policy, self.model.rollout_buffer, environments=1)
        mask = segment_mask(segments)
        starts = (mask.key.position == 0) & (mask.key.episode != EMPTY)
        weights = {number: layer[0] for number, layer in segment_weights(segments).items()}
        figure = attention_figure(weights, mask.allowed[0], starts[0])
        record_for_tensorboard(self.logger, "attention/maps", LoggedFigure(figure, close=False))
