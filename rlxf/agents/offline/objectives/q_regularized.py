"""Imitation with a critic: a policy that prefers actions of high value."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from rlxf.agents.common.actions import BoxActions, DiscreteActions
from rlxf.agents.common.losses import masked_mean
from rlxf.agents.offline.config import as_hidden_sizes
from rlxf.agents.offline.heads import (
    CategoricalHead,
    DeterministicHead,
    Head,
)
from rlxf.agents.offline.objectives.base import ObjectiveLoss, ObjectiveSpec
from rlxf.agents.offline.objectives.critic import (
    CriticWindows,
    DivergenceCheck,
    TwinQ,
    frozen_copy,
    largest_reward,
    window_targets,
)
from rlxf.attention import TransformerSpec
from rlxf.data import DatasetError, Trajectories
from rlxf.data.findings import UNUSED_REWARDS, unused_rewards
from rlxf.utils.checks import check_between, check_int, check_positive
from rlxf.utils.warnings import warn_user

SMALLEST_SCALE = 1e-6
"""Smallest divisor of action values."""


@dataclass(frozen=True)
class QRegularized(ObjectiveSpec):
    r"""Imitation with a critic: ``error(a) - eta Q(s, pi(s)) / mean |Q|``.

    At step i of a window that ends at step n, two action values Q are trained on the target

        ``y_i = sum_(j=i)^(e-1) g^(j-i) r_j + g^(e-i) min Q'(s_e, pi(s_e))``,  ``e = n``,

    with two target networks ``Q' <- (1 - tau) Q' + tau Q``. After a terminal state there is no value
    (`window_targets`); a truncated episode is bootstrapped from its last state. With ``n_steps`` m, the
    return is shorter, ``e = min(i + m, n)``. The policy stays near the actions of the data and prefers those
    of high value. It can therefore combine parts of several episodes, which imitation alone cannot.

    The values of an untrained critic are arbitrary, and a policy that follows them leaves the actions of the
    data. The weight eta therefore grows linearly from 0 over the first ``warmup_updates`` updates.

    The critic learns rewards in units of the agent's ``return_scale``, by default the standard deviation of
    the return-to-go. Training is thus independent of the unit of the rewards. A warning reports values beyond
    what the rewards allow (`DivergenceCheck`).

    Source: Hu et al. 2024, arXiv:2405.17098 (QT), section 4; with the normalization of TD3+BC (Fujimoto and
    Gu 2021, arXiv:2106.06860, section 4), and noise on target actions (TD3, arXiv:1802.09477, section 5.3).
    Other than in QT, the weight of the values grows at the beginning, target actions come from the trained
    policy and not from an average of it, and |Q| is that of the first network. The agent acts from one
    return; `HighestValueReturn` chooses the best of several by Q, as in the paper.

    Args:
        eta: weight of the values, above 0; smaller values are closer to imitation.
        discount: discount factor of the values.
        target_rate: tau, the rate at which target networks follow.
        hidden_sizes: widths of the hidden layers of the action values.
        n_steps: largest number of rewards m in a target; None for all up to the end of the window, as in the
            paper. Fewer rewards have less bias from the actions of the data, and depend more on Q'.
        warmup_updates: updates over which the weight of the values grows to eta; 0 for none. The default is
            several times the 1 / target_rate updates in which the target networks follow.

    Raises:
        TypeError: if a number has the wrong type.
        ValueError: if eta or target_rate is not positive, target_rate is above 1, discount is not from 0 to
            below 1, n_steps is less than 1, warmup_updates is negative, or there are more than 100 hidden
            layers.
    """

    paper: ClassVar[str] = "Hu et al. 2024, arXiv:2405.17098"
    eta: float = 1.0
    discount: float = 0.99
    target_rate: float = 0.005
    hidden_sizes: tuple[int, ...] = (256, 256)
    n_steps: int | None = None
    warmup_updates: int = 1_000

    def __post_init__(self) -> None:
        check_positive("QRegularized eta", self.eta)
        check_between("QRegularized target_rate", self.target_rate, 0, 1, inclusive="right")
        check_between("QRegularized discount", self.discount, 0, 1, inclusive="left")
        sizes = as_hidden_sizes("QRegularized hidden_sizes", self.hidden_sizes)
        object.__setattr__(self, "hidden_sizes", sizes)
        if self.n_steps is not None:
            check_int("QRegularized n_steps", self.n_steps)
        check_int("QRegularized warmup_updates", self.warmup_updates, least=0)

    def check_windows(self, steps: int) -> None:
        if steps < 2:
            raise ValueError(
                f"objective={self} learns from the rewards between the steps of a window, got windows of one "
                f"step; use a DecisionTransformer with context_length of at least 2"
            )

    def check_accumulation(self, steps: int) -> None:
        if steps > 1:
            raise ValueError(
                f"objective={self} divides by the mean of |Q| over the whole batch, got "
                f"gradient_accumulation_steps={steps}; use 1, or another objective"
            )

    def check_core(self, core: TransformerSpec, context: str) -> None:
        core.depth.check_no_early_exit(f"objective={self}")
        if context != "window":
            raise ValueError(f"objective={self} learns from windows that end alike; use context='window'")

    def build(self, width: int, actions: BoxActions | DiscreteActions, features: int) -> "QRegularizedLoss":
        """Build the loss, its head and the critic.

        Args:
            width: width of the outputs of the transformer.
            actions: encoding of actions.
            features: number of features of an observation.
        """
        head: type[Any] = actions.select(continuous=DeterministicHead, discrete=CategoricalHead)
        return QRegularizedLoss(self, head(width, actions), TwinQ(features, actions, self.hidden_sizes))


class QRegularizedLoss(ObjectiveLoss):
    """Loss of `QRegularized` with its action head, action values and target networks.

    The buffer ``updates`` counts the updates of the critic. `DivergenceCheck` reads the buffer
    ``divergence_numbers`` of the last batch.
    """

    updates: Tensor
    divergence_numbers: Tensor

    def __init__(self, spec: QRegularized, head: Head, critic: TwinQ):
        super().__init__()
        self.spec = spec
        self.head = head
        self.critic = critic
        self.target = frozen_copy(critic)
        self.divergence = DivergenceCheck(spec.discount)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.register_buffer("divergence_numbers", torch.zeros(2), persistent=False)

    def check_episodes(self, data: Trajectories, episodes: NDArray[np.int64]) -> None:
        """Raise DatasetError if no episode has a marked end, or no value target contains a reward."""
        steps = data.steps_of(episodes)
        rewards, complete = data.rewards[steps], data.complete_transitions[steps]
        if not rewards.any():
            raise DatasetError(
                f"objective={self.spec} learns from rewards, but all {len(rewards):,} rewards of the data "
                f"are 0: record the rewards, or use objective=Imitation() or behavior cloning, which need "
                f"none"
            )
        if not (data.terminated | data.truncated)[episodes].any():
            raise DatasetError(
                f"objective={self.spec} learns where episodes end, but none of the {len(episodes):,} "
                f"episodes is terminated or truncated: mark their ends, or use objective=Imitation() or "
                f"behavior cloning, which need no ends"
            )
        if not rewards[complete].any():
            raise DatasetError(
                f"objective={self.spec} learns from rewards, but all rewards other than 0 are "
                f"{UNUSED_REWARDS}"
            )
        if note := unused_rewards(rewards, complete):
            warn_user(f"objective={self.spec}: {note}")

    def check_processes(self, world_size: int) -> None:
        """Raise ValueError if there are several: means of the critic are over other steps than the loss."""
        if world_size > 1:
            raise ValueError(
                f"objective={self.spec} supports one process, got {world_size}: train without torchrun"
            )

    def check_online(self) -> None:
        """Accept every head: deterministic policies explore with noise on their actions."""

    def forward(self, y: Tensor, actions: Tensor, weight: Tensor) -> dict[str, Tensor]:
        error = masked_mean(self.head.error(y, actions), weight)
        return {"loss": error, "imitation_loss": error}

    def add_critic(
        self, parts: dict[str, Tensor], y: Tensor, windows: Callable[[], CriticWindows]
    ) -> dict[str, Tensor]:
        batch = windows()
        chosen = self.head.network_action(y)
        critic_loss, target = self._critic_loss(chosen.detach(), batch)
        frozen = {name: value.detach() for name, value in self.critic.named_parameters()}
        q = functional_call(self.critic, frozen, (batch.features.detach(), chosen))[0]
        value, scale = (masked_mean(x, batch.mask) for x in (q, q.detach().abs()))
        self.divergence_numbers.copy_(torch.stack([scale, largest_reward(batch)]))
        loss = parts["loss"] - self._weight() * value / scale.clamp(min=SMALLEST_SCALE) + critic_loss
        return parts | {"loss": loss, "critic_loss": critic_loss, "q": value, "q_target": target}

    def action_values(self, features: Tensor, y: Tensor) -> Tensor:
        """Return the smaller value of both critics, (B,)."""
        action = self.head.actions(self.head.choose(y, deterministic=True))
        smaller: Tensor = self.critic(features, action).amin(dim=0)
        return smaller

    def _weight(self) -> Tensor:
        """Return the weight of the values in update n, ``eta min(1, n / (warmup_updates + 1))``."""
        fraction: Tensor = (self.updates + 1) / (self.spec.warmup_updates + 1)
        return self.spec.eta * fraction.clamp(max=1)

    def _critic_loss(self, chosen: Tensor, windows: CriticWindows) -> tuple[Tensor, Tensor]:
        """Return the mean squared error of both action values, and the mean target."""
        x = windows.features.detach()
        spec = self.spec
        used = slice(-1 if spec.n_steps is None else None, None)  # steps whose value targets use
        with torch.no_grad():
            action = self.head.add_target_noise(chosen[:, used])
            values = self.target(x[:, used], action).amin(dim=0)
            targets = window_targets(windows.rewards, values, windows.terminated, spec.discount, spec.n_steps)
        weight = windows.mask.to(x.dtype)
        weight = torch.cat([weight[:, :-1], (weight[:, -1] * windows.terminated)[:, None]], dim=1)
        error = (self.critic(x, windows.actions) - targets).square().sum(dim=0)
        return masked_mean(error, weight), masked_mean(targets, weight)

    @torch.no_grad()
    def after_init(self) -> None:
        """Start the target networks with the weights of the action values."""
        for target, value in zip(self.target.buffers(), self.critic.parameters(), strict=True):
            target.copy_(value)

    def after_losses(self) -> None:
        """Warn if the action values diverge."""
        self.divergence.check(self.divergence_numbers)

    @torch.no_grad()
    def after_update(self) -> None:
        """Move the target networks towards the action values, and count the update."""
        self.updates += 1
        for target, value in zip(self.target.buffers(), self.critic.parameters(), strict=True):
            target.lerp_(value, self.spec.target_rate)
