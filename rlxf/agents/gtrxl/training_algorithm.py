"""Training algorithms of a rollout: the interface, PPO's loss and the minibatch updates."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor

from rlxf.agents.common.losses import masked_mean
from rlxf.agents.common.numerics import clip_grad_norm_checked
from rlxf.agents.gtrxl.early_exit import auxiliary_losses
from rlxf.agents.gtrxl.gae import approximate_kl, clipped_objective, clipped_values, normalize_advantages
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.rollout_buffer import SegmentBatch
from rlxf.attention import TokenIndex
from rlxf.training.distributed import process_group
from rlxf.training.distributed.group import ProcessGroup

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.ppo import GTrXLPPO


@dataclass(frozen=True)
class PPOLoss:
    """``-clipped objective + vf_coef (V - return)^2 - ent_coef entropy + reconstruction_coef error``.

    Auxiliary losses of the transformer are added, e.g. "penalty" for long attention spans.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 9.

    Args:
        clip_range: epsilon of the clipped objective.
        clip_range_vf: largest difference of a value from that of the rollout, in units of the returns; None
            for no clipping.
        ent_coef: weight of the entropy.
        vf_coef: weight of the value loss, already divided by the variance of returns.
        reconstruction_coef: weight of the observation reconstruction loss.
    """

    clip_range: float
    clip_range_vf: float | None
    ent_coef: float
    vf_coef: float
    reconstruction_coef: float

    def __call__(self, policy: GTrXLPolicy, batch: SegmentBatch) -> dict[str, Tensor]:
        """Return means over the steps of weight 1 in a minibatch: "loss", and its terms with SB3's names."""
        exits = policy.exit_outputs(batch.obs, batch.previous, batch.index, batch.state)
        added = auxiliary_losses(policy, exits, batch, self.vf_coef)
        latent = exits.outputs[-1].flatten(0, 1)
        distribution, values = policy.heads(latent)
        log_ratio = distribution.log_prob(batch.actions) - batch.log_probs
        ratio = log_ratio.exp()
        gain = masked_mean(clipped_objective(ratio, batch.advantages, self.clip_range), batch.weight)
        values = clipped_values(values, batch.values, self.clip_range_vf)
        value_loss = masked_mean((batch.returns - values).square(), batch.weight)
        entropy = masked_mean(distribution.entropy(), batch.weight)  # type: ignore[arg-type]
        loss = -gain + self.vf_coef * value_loss - self.ent_coef * entropy
        parts = {"policy_gradient_loss": -gain, "value_loss": value_loss, "entropy_loss": -entropy}
        if self.reconstruction_coef:
            error = masked_mean(policy.reconstruction_error(latent, batch.obs), batch.weight)
            loss = loss + self.reconstruction_coef * error
            parts["reconstruction_loss"] = error
        for part in added.values():
            loss = loss + part
        parts |= added
        if (depth := policy.transformer.mean_depth()) is not None:
            parts["mean_depth"] = depth
        with torch.no_grad():
            parts["approx_kl"] = masked_mean(approximate_kl(log_ratio), batch.weight)
            parts["clip_fraction"] = masked_mean(((ratio - 1).abs() > self.clip_range).float(), batch.weight)
        return {"loss": loss} | parts


@dataclass
class PolicyUpdate:
    """Optimizer steps of an update, with their metrics.

    Args:
        policy: the policy to train.
        objective: returns "loss" and its terms for a minibatch.
        max_grad_norm: largest norm of the gradient.
        target_kl: stop if the KL divergence of a minibatch exceeds 1.5 times this; None for never.
        ranks: the process group; each process has a part of a minibatch, and all stop together.
    """

    policy: GTrXLPolicy
    objective: Callable[[GTrXLPolicy, Any], dict[str, Tensor]]
    max_grad_norm: float
    target_kl: float | None
    ranks: ProcessGroup = field(default_factory=process_group)
    _notes: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def epoch(self, minibatches: Iterable[Any]) -> bool:
        """Take an optimizer step for each minibatch; return False if ``target_kl`` stopped the update.

        Raises:
            NumericalError: before the optimizer step, if the loss or a gradient is not finite.
        """
        for batch in minibatches:
            parts = self.ranks.reduce_means(self.objective(self.policy, batch), batch.weight.sum())
            self._note(parts)
            if self.target_kl is not None and parts["approx_kl"] > 1.5 * self.target_kl:
                self.policy.transformer.skip_update()
                return False
            self._step(parts)
        return True

    def means(self) -> dict[str, float]:
        """Return the mean of each metric over the minibatches so far."""
        return {name: torch.stack(values).mean().item() for name, values in self._notes.items()}

    def _step(self, parts: dict[str, Tensor]) -> None:
        self.policy.optimizer.zero_grad()
        parts["loss"].backward()
        self.ranks.all_reduce_gradients(self.policy.parameters())
        norm = clip_grad_norm_checked(parts, self.policy, self.policy.parameters(), self.max_grad_norm)
        self._note({"grad_norm": norm})
        self.policy.optimizer.step()
        self.policy.transformer.after_update()

    def _note(self, parts: dict[str, Tensor]) -> None:
        for name, value in parts.items():
            self._notes[name].append(value.detach())


class TrainingAlgorithm(ABC):
    """Training algorithm: chooses the actions of a rollout, and updates the agent after it."""

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
    def learn(self, agent: "GTrXLPPO") -> dict[str, float]:
        """Update the agent with the rollout in its buffer, and return the metrics to log."""


class PPOTraining(TrainingAlgorithm):
    """PPO: actions are sampled from the policy, which is trained with advantages."""

    def start_rollout(self) -> None:
        """Do nothing: PPO stores no data outside of the rollout buffer."""

    def choose(self, obs: PyTorchObs, index: TokenIndex, own: Distribution) -> Tensor:
        """Sample from the distribution of the policy."""
        return own.get_actions()

    def learn(self, agent: "GTrXLPPO") -> dict[str, float]:
        """Train for ``n_epochs`` passes over the segments, fewer if ``target_kl`` is exceeded."""
        buffer, objective = agent.rollout_buffer, agent.objective()
        update = PolicyUpdate(agent.policy, objective, agent.max_grad_norm, agent.target_kl)
        epsilon = agent.advantage_epsilon * float(agent.policy.value_net.deviation)
        advantages = self._normalised(agent, epsilon) if agent.normalize_advantage else buffer.advantages
        segments = agent.batch_size // agent.segment_length
        for _ in range(agent.n_epochs):
            agent._n_updates += 1
            if not update.epoch(buffer.minibatches(segments, advantages, agent.order, agent.ranks)):
                break
        return update.means() | {"clip_range": objective.clip_range, "ent_coef": objective.ent_coef}

    @staticmethod
    def _normalised(agent: "GTrXLPPO", epsilon: float) -> Tensor:
        """Return the advantages (E, steps) of this process, normalized with those of all processes."""
        buffer, ranks = agent.rollout_buffer, agent.ranks
        advantages, weight = ranks.all_gather(buffer.advantages), ranks.all_gather(buffer.weight)
        return ranks.own(normalize_advantages(advantages, weight, epsilon))
