"""Optimizer step on a batch of windows, the warm-up of its learning rate, and the progress bar."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from stable_baselines3.common.callbacks import ProgressBarCallback
from torch import Tensor, nn

from rlxf.agents.common.accumulation import GradientSetter, Losses, losses_of_batch
from rlxf.agents.common.compiled_losses import CompiledLosses, structure_of
from rlxf.agents.common.gradient_programs import LossFunction
from rlxf.agents.common.numerics import clip_grad_norm_checked, naming_output_faults
from rlxf.agents.offline.model import OfflineModel
from rlxf.agents.offline.weight_averaging import WeightAverage
from rlxf.attention.functional_step import named_tensors, with_tensors
from rlxf.training.distributed import process_group
from rlxf.training.process_group import ProcessGroup
from rlxf.utils.matrix_products import float32_products

JOINED_VALUES = 1024
"""Number of pending values of a metric that are joined to one tensor, which needs less memory."""


@dataclass
class OfflineUpdate:
    """Gradient update that also records metrics.

    Args:
        trained: model to train.
        optimizer: optimizer of the model; the gradient of its first parameter group is clipped.
        max_grad_norm: maximum gradient norm; larger gradients are clipped.
        average: average of the weights of the model; None for none.
        accumulation_steps: number of micro-batches into which each batch is divided.
        ranks: process group of data-parallel training; each rank processes its part of a batch.
        compiled: computes losses and gradients as one program, see `losses_of_batch`; None to run their
            operations one by one.
    """

    resumable: ClassVar[bool] = True
    """True if a checkpoint holds all state of the training, so that it can be resumed."""
    trained: OfflineModel
    optimizer: torch.optim.Optimizer
    max_grad_norm: float
    average: WeightAverage | None = None
    accumulation_steps: int = 1
    ranks: ProcessGroup = field(default_factory=process_group)
    compiled: CompiledLosses | None = None
    _set_gradients: GradientSetter | None = field(default=None, init=False)
    _metrics: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list), init=False)

    @property
    def acting(self) -> OfflineModel:
        """Model that acts and is saved as the policy: the average, or the trained model itself."""
        return self.trained if self.average is None else self.average.acting

    def begin(self) -> None:
        """Put the model into training mode; call it before each update."""
        if self.average is not None:
            self.average.begin()
        self.trained.train()

    def restart_average(self) -> None:
        """Start the average again with the next update, e.g. after a transfer of weights."""
        if self.average is not None:
            self.average.updates = 0

    def __call__(self, batch: Any) -> None:
        """Update the model on a batch.

        Raises:
            NumericalError: before the optimizer step, if the loss or a gradient is not finite.
        """
        size = self.trained.product_size(batch) // self.accumulation_steps
        with float32_products(size, next(self.trained.parameters()).device):
            losses = self.ranks.fail_together(partial(self._accumulate, batch))
            self.after_losses()
            parts = self.ranks.reduce_means(losses, self.loss_count(batch))
            with naming_output_faults(partial(self.losses, batch)):
                norm = self.step(parts)
        for name, value in (parts | {"grad_norm": norm}).items():
            self._record(name, value.detach().view(1))

    def _record(self, name: str, value: Tensor) -> None:
        """Add the value of an update, (1,); many values are joined, as a training without log keeps all."""
        values = self._metrics[name]
        values.append(value)
        if len(values) == JOINED_VALUES:
            values[:] = [torch.cat(values)]

    def losses(self, batch: Any) -> dict[str, Tensor]:
        """Return the "loss" and its parts."""
        return self.trained.losses(batch)

    def after_losses(self) -> None:
        """Check the numbers that `losses` has stored."""
        self.trained.after_losses()

    def after_update(self) -> None:
        """Notify the model of an optimizer step."""
        self.trained.after_update()

    def loss_count(self, batch: Any) -> Tensor:
        """Return the number of steps over which `losses` are averaged, a scalar."""
        return self.trained.loss_count(batch)

    def clear_gradients(self) -> None:
        """Clear the gradients of all trained parameters."""
        self.optimizer.zero_grad()

    def _accumulate(self, batch: Any) -> dict[str, Tensor]:
        """Return `losses`, with the gradients of all micro-batches but the last."""
        self.clear_gradients()
        program = None if self.compiled is None else partial(self._compiled_losses, self.compiled)
        losses, self._set_gradients = losses_of_batch(
            self.losses, batch, self.loss_count, self.accumulation_steps, self.ranks, program
        )
        return losses

    def _compiled_losses(self, compiled: CompiledLosses, batch: Any) -> tuple[Losses, GradientSetter] | None:
        make = partial(self._loss_function, batch)
        settings = self.trained.capture_settings()
        return compiled(self.trained, named_tensors(batch, skipped=()), make, settings)

    def _loss_function(self, batch: Any) -> LossFunction:
        """Return `losses` as a function of the tensors of a batch by name."""
        self.trained.check_capture()
        structure = structure_of(batch)
        return lambda tensors: self.losses(with_tensors(structure, tensors, skipped=()))

    def step(self, parts: dict[str, Tensor]) -> Tensor:
        """Take an optimizer step on the "loss" among the parts; return the gradient norm before clipping."""
        if self._set_gradients is None:
            parts["loss"].backward()
        else:
            self._set_gradients()
        self.ranks.all_reduce_gradients(self.trained.parameters())
        weights, *others = (group["params"] for group in self.optimizer.param_groups)
        norm = clip_grad_norm_checked(parts, self.trained, weights, self.max_grad_norm, chain(*others))
        self.optimizer.step()
        self.after_update()
        if self.average is not None:
            self.average.update()
        return norm

    def pop_metric_means(self) -> dict[str, float]:
        """Return the mean of each metric over the updates since the last call."""
        means = {name: values.mean().item() for name, values in self.metrics().items()}
        self._metrics.clear()
        return means

    def metrics(self) -> dict[str, Tensor]:
        """Return each metric of the updates since the last call of `pop_metric_means`, (updates,)."""
        return {name: torch.cat(values) for name, values in self._metrics.items()}

    def load_metrics(self, metrics: Mapping[str, Tensor]) -> None:
        """Restore pending metrics from the result of `metrics`."""
        self._metrics.update((name, [values]) for name, values in metrics.items())


UNCLIPPED = ("loss.log_temperature", "loss.critic.")
"""Beginnings of the names of parameters without weight decay and gradient clipping."""


def warmup_factor(update: int, updates: int) -> float:
    """Compute the learning-rate factor ``min(1, (update + 1) / updates)``; ``update`` counts from 0."""
    return min(1.0, (update + 1) / max(1, updates))


def make_optimizer(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """Create AdamW; critics and the dual variable of the entropy have neither weight decay nor clipping."""
    weights = dict(model.named_parameters())
    apart = [weights.pop(name) for name in list(weights) if name.startswith(UNCLIPPED)]
    groups: list[dict[str, Any]] = [{"params": [*weights.values()]}, {"params": apart, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, weight_decay=weight_decay, fused=True)


class ProgressBar(ProgressBarCallback):
    """Progress bar driven by ``num_timesteps``; SB3's bar needs an environment to count steps."""

    def _on_training_start(self) -> None:
        super()._on_training_start()
        self._start = self.model.num_timesteps

    def _on_step(self) -> bool:
        self.pbar.update(self.model.num_timesteps - self._start - self.pbar.n)
        return True
