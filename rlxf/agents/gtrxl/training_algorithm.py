"""Training algorithms of a rollout: the interface, PPO, and the minibatch updates."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor

from rlxf.agents.common.numerics import clip_grad_norm_checked
from rlxf.agents.gtrxl.losses import PPOLoss
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.rollout_buffer import SegmentBatch, SegmentBuffer
from rlxf.attention import TokenIndex
from rlxf.training.distributed import process_group
from rlxf.training.distributed.group import ProcessGroup


@dataclass
class PolicyUpdate:
    """Optimizer steps of an update, with their metrics.

    Args:
        policy: the policy to train.
        objective: returns "loss" and its terms for a minibatch.
        max_grad_norm: largest norm of the gradient.
        target_kl: stop if the KL divergence of a minibatch exceeds 1.5 times this; None for never.
        coefficients: coefficients of the objective, to be reported with the metrics.
        ranks: the process group; each process has a part of a minibatch, and all stop together.
    """

    policy: GTrXLPolicy
    objective: Callable[[GTrXLPolicy, Any], dict[str, Tensor]]
    max_grad_norm: float
    target_kl: float | None
    coefficients: Mapping[str, float] = field(default_factory=dict)
    ranks: ProcessGroup = field(default_factory=process_group)
    _metrics: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def epoch(self, minibatches: Iterable[Any]) -> bool:
        """Take an optimizer step for each minibatch; return False if ``target_kl`` stopped the update.

        Raises:
            NumericalError: before the optimizer step, if the loss or a gradient is not finite.
        """
        for batch in minibatches:
            parts = self.ranks.reduce_means(self.objective(self.policy, batch), batch.weight.sum())
            self._record(parts)
            if self.target_kl is not None and parts["approx_kl"] > 1.5 * self.target_kl:
                self.policy.transformer.skip_update()
                return False
            self._step(parts)
        return True

    def metrics(self) -> dict[str, float]:
        """Return the mean of each metric over the minibatches so far, and the coefficients."""
        means = {name: torch.stack(values).mean().item() for name, values in self._metrics.items()}
        return means | dict(self.coefficients)

    def _step(self, parts: dict[str, Tensor]) -> None:
        self.policy.optimizer.zero_grad()
        parts["loss"].backward()
        self.ranks.all_reduce_gradients(self.policy.parameters())
        norm = clip_grad_norm_checked(parts, self.policy, self.policy.parameters(), self.max_grad_norm)
        self._record({"grad_norm": norm})
        self.policy.optimizer.step()
        self.policy.transformer.after_update()

    def _record(self, parts: dict[str, Tensor]) -> None:
        for name, value in parts.items():
            self._metrics[name].append(value.detach())


class TrainingAlgorithm(ABC):
    """Training algorithm: chooses the actions of a rollout, and provides the update after it."""

    @property
    @abstractmethod
    def resumable(self) -> bool:
        """True if the algorithm has no state between two rollouts, so that a training run can be resumed."""

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
        self, policy: GTrXLPolicy, loss: PPOLoss, max_grad_norm: float, target_kl: float | None
    ) -> PolicyUpdate:
        """Return the update of a policy after a rollout.

        Args:
            policy: the policy to train.
            loss: PPO's loss with the current coefficients.
            max_grad_norm: largest norm of the gradient.
            target_kl: bound on the KL divergence, see `PolicyUpdate`.
        """

    @abstractmethod
    def minibatches(
        self, buffer: SegmentBuffer, segments: int, advantages: Tensor, order: torch.Generator
    ) -> Iterable[Any]:
        """Yield all segments of the rollout once in random order; arguments as in `SegmentBuffer`."""


class PPOTraining(TrainingAlgorithm):
    """PPO: actions are sampled from the policy, which is trained with advantages."""

    resumable = True

    def start_rollout(self) -> None:
        """Do nothing: PPO stores no data outside of the rollout buffer."""

    def choose(self, obs: PyTorchObs, index: TokenIndex, own: Distribution) -> Tensor:
        """Sample from the distribution of the policy."""
        return own.get_actions()

    def start_update(
        self, policy: GTrXLPolicy, loss: PPOLoss, max_grad_norm: float, target_kl: float | None
    ) -> PolicyUpdate:
        """Return an update with PPO's loss."""
        coefficients = {"clip_range": loss.clip_range, "ent_coef": loss.ent_coef}
        return PolicyUpdate(policy, loss, max_grad_norm, target_kl, coefficients)

    def minibatches(
        self, buffer: SegmentBuffer, segments: int, advantages: Tensor, order: torch.Generator
    ) -> Iterable[SegmentBatch]:
        """Yield the minibatches of the buffer."""
        return buffer.minibatches(segments, advantages, order, process_group())
