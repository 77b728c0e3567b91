"""One update: the loss of a batch of windows, and the step of the optimiser."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlxf.agents.decision_transformer.trajectory_model import TrajectoryModel
from rlxf.agents.finite import clip_finite
from rlxf.training.joining import here
from rlxf.training.ranks import Ranks


@dataclass
class Update:
    """Takes the optimiser's steps and notes what they did.

    Args:
        model: what is trained.
        optimizer: of its weights; the first group's gradient is bounded.
        max_grad_norm: longer gradients are shortened to it.
        ranks: the processes that share a batch; each learns from its part.
    """

    model: TrajectoryModel
    optimizer: torch.optim.Optimizer
    max_grad_norm: float
    ranks: Ranks = field(default_factory=here)
    _notes: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def __call__(self, batch: Any) -> None:
        """Learn from a batch once.

        Raises:
            NumericalError: before the step from a loss or a gradient that is not finite.
        """
        parts = self.ranks.pooled(self.losses(batch), self.model.weight(batch))
        self._note(parts | {"grad_norm": self.step(parts)})

    def losses(self, batch: Any) -> dict[str, Tensor]:
        """What is minimised, "loss", and its parts."""
        return self.model.losses(batch)

    def step(self, parts: dict[str, Tensor]) -> Tensor:
        """One step of the optimiser, down the "loss" among the parts; gives the norm of the gradient."""
        self.optimizer.zero_grad()
        parts["loss"].backward()
        self.ranks.add_gradients(self.model.parameters())
        weights, *others = (group["params"] for group in self.optimizer.param_groups)
        norm = clip_finite(parts, self.model, weights, self.max_grad_norm, chain(*others))
        self.optimizer.step()
        self.model.transformer.after_update()
        return norm

    def take_means(self) -> dict[str, float]:
        """Mean of each part over the updates since the last call."""
        means = {name: values.mean().item() for name, values in self.notes().items()}
        self._notes.clear()
        return means

    def notes(self) -> dict[str, Tensor]:
        """Each part in the updates since `take_means` was last called, (updates,)."""
        return {name: torch.stack(values) for name, values in self._notes.items()}

    def take_up(self, notes: Mapping[str, Tensor]) -> None:
        """Go on noting behind what `notes` gave."""
        for name, values in notes.items():
            self._notes[name] = list(values)

    def _note(self, parts: dict[str, Tensor]) -> None:
        for name, value in parts.items():
            self._notes[name].append(value.detach())


def make_optimizer(model: TrajectoryModel, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW. The dual variable of the entropy is no weight: it neither decays nor counts in the norm."""
    weights: list[Tensor] = []
    dual: list[Tensor] = []
    for name, parameter in model.named_parameters():
        (dual if name.endswith("log_temperature") else weights).append(parameter)
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": dual, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, weight_decay=weight_decay, fused=True)
