"""Training algorithms on rollouts: the interface, the minibatch updates, and PPO."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor, nn

from rlxf.agents.common.accumulation import GradientSetter, Losses, losses_of_batch
from rlxf.agents.common.numerics import clip_grad_norm_checked, naming_output_faults
from rlxf.agents.gtrxl.compiled_losses import CompiledPPOLosses
from rlxf.agents.gtrxl.losses import PPOLoss
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.rollout_buffer import SegmentBatch, SegmentBuffer
from rlxf.attention import TokenIndex
from rlxf.training.distributed import process_group
from rlxf.training.process_group import ProcessGroup
from rlxf.utils.matrix_products import float32_products


@dataclass
class PolicyUpdate:
    """Optimizer steps of an update, with their metrics.

    Args:
        policy: the policy to train.
        objective: returns "loss" and its terms for a minibatch.
        max_grad_norm: maximum gradient norm; larger gradients are clipped.
        target_kl: stop if the KL divergence of a minibatch exceeds 1.5 times this; None for never.
        coefficients: coefficients of the objective, to be reported with the metrics.
        accumulation_steps: number of micro-batches into which each minibatch is divided.
        ranks: the process group; each process has a part of a minibatch, and all stop together.
        compiled: computes losses and gradients of a minibatch as one program, see `losses_of_batch`; None to
            run their operations one by one.
    """

    policy: GTrXLPolicy
    objective: Callable[[GTrXLPolicy, Any], Losses]
    max_grad_norm: float
    target_kl: float | None
    coefficients: Mapping[str, float] = field(default_factory=dict)
    accumulation_steps: int = 1
    ranks: ProcessGroup = field(default_factory=process_group)
    compiled: Callable[[Any], tuple[Losses, GradientSetter] | None] | None = None
    _set_gradients: GradientSetter | None = field(default=None, init=False)
    _parameters: Sequence[nn.Parameter] = field(init=False)
    _metrics: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list), init=False)

    def __post_init__(self) -> None:
        self._parameters = list(self.policy.parameters())

    def epoch(self, minibatches: Iterable[Any]) -> bool:
        """Take an optimizer step for each minibatch; return False if ``target_kl`` stopped the update.

        Raises:
            NumericalError: before the optimizer step, if the loss or a gradient is not finite.
        """
        for batch in minibatches:
            size = self.policy.product_size(batch.weight.numel() // self.accumulation_steps)
            with float32_products(size, batch.weight.device):
                if not self._update(batch):
                    return False
        return True

    def _update(self, batch: Any) -> bool:
        """Take an optimizer step for a minibatch, or return False if ``target_kl`` stops the update."""
        losses = self.ranks.fail_together(partial(self._losses, batch))
        parts = self.ranks.reduce_means(losses, batch.weight.sum())
        self._record(parts)
        if self.target_kl is not None and parts["approx_kl"] > 1.5 * self.target_kl:
            self.policy.transformer.skip_update()
            self._clear_accumulated()
            return False
        with naming_output_faults(partial(self.objective, self.policy, batch)):
            self._step(parts)
        return True

    def metrics(self) -> dict[str, float]:
        """Return the mean of each metric over the minibatches so far, and the coefficients."""
        means = {name: torch.stack(values).mean().item() for name, values in self._metrics.items()}
        return means | dict(self.coefficients)

    def last(self, name: str) -> float:
        """Return a metric of the last minibatch."""
        return self._metrics[name][-1].item()

    def _losses(self, batch: Any) -> Losses:
        """Return the losses of a minibatch, with the gradients of all its micro-batches but the last."""
        self._clear_accumulated()
        losses, self._set_gradients = losses_of_batch(
            partial(self.objective, self.policy),
            batch,
            lambda part: part.weight.sum(),
            self.accumulation_steps,
            self.ranks,
            self.compiled,
        )
        return losses

    def _clear_gradients(self) -> None:
        self.policy.optimizer.zero_grad()

    def _clear_accumulated(self) -> None:
        """Clear gradients to which micro-batches add; without those, the last ones stay for the log."""
        if self.accumulation_steps > 1:
            self._clear_gradients()

    def _step(self, parts: Losses) -> None:
        if self._set_gradients is None:
            self._backward(parts["loss"])
        else:
            self._clear_gradients()  # also those of parameters that are no longer trained
            self._set_gradients()
            if self.target_kl is not None:
                self._copy_gradients()
        self.ranks.all_reduce_gradients(self._parameters)
        norm = clip_grad_norm_checked(parts, self.policy, self._parameters, self.max_grad_norm)
        self._record({"grad_norm": norm})
        self.policy.optimizer.step()
        self.policy.transformer.after_update()

    def _copy_gradients(self) -> None:
        """Copy the gradients, whose memory a captured program overwrites in the minibatch that stops."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def _backward(self, loss: Tensor) -> None:
        if self.accumulation_steps == 1:
            self._clear_gradients()
        loss.backward()

    def _record(self, parts: Losses) -> None:
        for name, value in parts.items():
            self._metrics[name].append(value.detach())


class TrainingAlgorithm(ABC):
    """Training algorithm: chooses the actions of a rollout, and provides the update after it.

    Args:
        policy: the policy to train.
        order: generator of the order of minibatches.
    """

    resumable: ClassVar[bool]
    """True if the algorithm has no state between two rollouts, so that a training run can be resumed."""

    def __init__(self, policy: GTrXLPolicy, order: torch.Generator):
        self.policy, self.order = policy, order

    @abstractmethod
    def start_rollout(self) -> None:
        """Start a rollout, and discard data of a previous one that had no update."""

    @abstractmethod
    def choose(self, obs: PyTorchObs, index: TokenIndex, own: Distribution) -> Tensor:
        """Sample the actions of one step of E environments.

        Args:
            obs: E observations.
            index: (E, 1), position and episode of the step.
            own: action distribution of the agent.
        """

    @abstractmethod
    def start_update(
        self, loss: PPOLoss, max_grad_norm: float, target_kl: float | None, accumulation_steps: int = 1
    ) -> PolicyUpdate:
        """Return the update of the policy after a rollout.

        Args:
            loss: PPO's loss with the current coefficients.
            max_grad_norm: maximum gradient norm; larger gradients are clipped.
            target_kl: bound on the KL divergence, see `PolicyUpdate`.
            accumulation_steps: number of micro-batches, see `PolicyUpdate`.
        """

    @abstractmethod
    def minibatches(self, buffer: SegmentBuffer, segments: int, advantages: Tensor) -> Iterable[Any]:
        """Yield minibatches that together contain all segments of the rollout once, in random order.

        Arguments as in `SegmentBuffer`.
        """


class PPOTraining(TrainingAlgorithm):
    """PPO: actions are sampled from the policy, which is trained with advantages.

    Args:
        policy: the policy to train.
        order: generator of the order of minibatches.
        compiles: True to compile updates, or to capture them on a GPU, see `CompiledPPOLosses`.
    """

    resumable = True

    def __init__(self, policy: GTrXLPolicy, order: torch.Generator, compiles: bool = False):
        super().__init__(policy, order)
        self._compiled = CompiledPPOLosses(policy.device.type) if compiles else None

    def start_rollout(self) -> None:
        """Do nothing: PPO stores no data outside of the rollout buffer."""

    def choose(self, obs: PyTorchObs, index: TokenIndex, own: Distribution) -> Tensor:
        """Sample from the distribution of the policy."""
        return self.policy.explore(own)

    def start_update(
        self, loss: PPOLoss, max_grad_norm: float, target_kl: float | None, accumulation_steps: int = 1
    ) -> PolicyUpdate:
        """Return an update with PPO's loss."""
        coefficients = {"clip_range": loss.clip_range, "ent_coef": loss.ent_coef}
        return PolicyUpdate(
            self.policy,
            loss,
            max_grad_norm=max_grad_norm,
            target_kl=target_kl,
            coefficients=coefficients,
            accumulation_steps=accumulation_steps,
            compiled=None if self._compiled is None else partial(self._compiled, self.policy, loss),
        )

    def minibatches(self, buffer: SegmentBuffer, segments: int, advantages: Tensor) -> Iterable[SegmentBatch]:
        """Yield the minibatches of the buffer."""
        return buffer.minibatches(segments, advantages, self.order, process_group())
