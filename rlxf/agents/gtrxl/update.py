"""PPO loss of a minibatch of segments, and the optimizer steps of an update."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlxf.agents.finite import clip_finite
from rlxf.agents.gtrxl.exits import added_parts
from rlxf.agents.gtrxl.objective import approximate_kl, clipped_objective, clipped_values
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.rollout import Segments
from rlxf.agents.losses import average
from rlxf.training.joining import here
from rlxf.training.ranks import Ranks


@dataclass(frozen=True)
class Objective:
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

    def __call__(self, policy: GTrXLPolicy, batch: Segments) -> dict[str, Tensor]:
        """Return means over the steps of weight 1 in a minibatch: "loss", and its terms with SB3's names."""
        exits = policy.exits(batch.obs, batch.previous, batch.index, batch.state)
        added = added_parts(policy, exits, batch, self.vf_coef)
        latent = exits.outputs[-1].flatten(0, 1)
        distribution, values = policy.heads(latent)
        log_ratio = distribution.log_prob(batch.actions) - batch.log_probs
        ratio = log_ratio.exp()
        gain = average(clipped_objective(ratio, batch.advantages, self.clip_range), batch.weight)
        values = clipped_values(values, batch.values, self.clip_range_vf)
        value_loss = average((batch.returns - values).square(), batch.weight)
        entropy = average(distribution.entropy(), batch.weight)  # type: ignore[arg-type]
        loss = -gain + self.vf_coef * value_loss - self.ent_coef * entropy
        parts = {"policy_gradient_loss": -gain, "value_loss": value_loss, "entropy_loss": -entropy}
        if self.reconstruction_coef:
            error = average(policy.reconstruction_error(latent, batch.obs), batch.weight)
            loss = loss + self.reconstruction_coef * error
            parts["reconstruction_loss"] = error
        for part in added.values():
            loss = loss + part
        parts |= added
        if (depth := policy.transformer.mean_depth()) is not None:
            parts["mean_depth"] = depth
        with torch.no_grad():
            parts["approx_kl"] = average(approximate_kl(log_ratio), batch.weight)
            parts["clip_fraction"] = average(((ratio - 1).abs() > self.clip_range).float(), batch.weight)
        return {"loss": loss} | parts


@dataclass
class Update:
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
    ranks: Ranks = field(default_factory=here)
    _notes: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def epoch(self, minibatches: Iterable[Any]) -> bool:
        """Take an optimizer step for each minibatch; return False if ``target_kl`` stopped the update.

        Raises:
            NumericalError: before the optimizer step, if the loss or a gradient is not finite.
        """
        for batch in minibatches:
            parts = self.ranks.pooled(self.objective(self.policy, batch), batch.weight.sum())
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
        self.ranks.add_gradients(self.policy.parameters())
        norm = clip_finite(parts, self.policy, self.policy.parameters(), self.max_grad_norm)
        self._note({"grad_norm": norm})
        self.policy.optimizer.step()
        self.policy.transformer.after_update()

    def _note(self, parts: dict[str, Tensor]) -> None:
        for name, value in parts.items():
            self._notes[name].append(value.detach())
