"""Training objectives of offline agents: imitation, maximum entropy, and imitation with a critic."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rlxf.agents.common.actions import BoxActions, DiscreteActions
from rlxf.agents.common.losses import masked_mean
from rlxf.agents.offline.config import as_hidden_sizes
from rlxf.agents.offline.critic import CriticWindows, DivergenceCheck, TwinQ, frozen_copy, window_targets
from rlxf.agents.offline.heads import (
    CategoricalHead,
    DeterministicHead,
    Head,
    SquashedGaussianHead,
    StochasticHead,
)
from rlxf.attention import TransformerSpec
from rlxf.attention.technique import check_finite_number, check_int, check_positive
from rlxf.data import DatasetError, Trajectories

SMALLEST_SCALE = 1e-6
"""Smallest divisor of action values."""


class ObjectiveLoss(nn.Module, ABC):
    """Base class of the losses of objectives, with their action head."""

    head: Head

    @abstractmethod
    def forward(self, y: Tensor, actions: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """Compute "loss" and its parts from y (..., C), the actions of the dataset, and weights (...).

        Padding has weight 0.
        """

    def add_critic(
        self, parts: dict[str, Tensor], y: Tensor, windows: Callable[[], CriticWindows]
    ) -> dict[str, Tensor]:
        """Return the parts of the loss with those of a critic; without one, they are unchanged.

        Args:
            parts: result of `forward`.
            y: outputs of the transformer, (B, K, C).
            windows: function that returns the batch for the critic.
        """
        return parts

    def after_init(self) -> None:  # optional
        """Set state that depends on the initial weights."""

    def after_update(self) -> None:  # optional
        """Update state that depends on the weights, after each optimizer step."""

    def check_processes(self, world_size: int) -> None:  # optional
        """Raise ValueError if the objective does not support this number of processes."""

    def check_data(self, data: Trajectories) -> None:  # optional
        """Raise DatasetError if the objective cannot be trained on these data."""

    def check_online(self) -> None:
        """Raise ValueError unless the policy can be fine-tuned online: by default, if it is stochastic."""
        if not isinstance(self.head, StochasticHead):
            raise ValueError(
                "learn_online needs a policy that explores: train the agent with objective=MaximumEntropy(), "
                "whose policy is stochastic, or with QRegularized(), whose critic learns from noisy actions"
            )


class ObjectiveSpec:
    """Base class of the objectives."""

    def check_windows(self, steps: int) -> None:  # optional
        """Raise ValueError unless the objective can be trained on windows of this number of steps."""

    def check_core(self, core: TransformerSpec, context: str) -> None:  # optional
        """Raise ValueError unless the objective supports a core and a `DecisionTransformer`'s ``context``."""


@dataclass(frozen=True)
class Imitation(ObjectiveSpec):
    """Behavior cloning: ``mean of error(a_t)`` over the real (unpadded) steps.

    The error is the squared error for Box actions and the cross-entropy for discrete actions.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3.
    """

    paper: ClassVar[str] = "Chen et al. 2021, arXiv:2106.01345"

    def build(self, width: int, actions: BoxActions | DiscreteActions, features: int) -> "ImitationLoss":
        """Build the loss and its head; arguments as in `QRegularized.build`."""
        head: type[Any] = actions.select(continuous=DeterministicHead, discrete=CategoricalHead)
        return ImitationLoss(head(width, actions))


@dataclass(frozen=True)
class MaximumEntropy(ObjectiveSpec):
    r"""Maximum entropy: ``mean of -log p(a_t) - lambda H`` over the real (unpadded) steps.

    lambda > 0 is the dual variable of the constraint ``H >= beta`` on the entropy H. It is trained jointly
    and minimizes ``lambda (H - beta)``, so it grows while the entropy is below beta. Box actions are drawn
    from a squashed Gaussian.

    Source: Zheng et al. 2022, arXiv:2202.05607, section 4, equations 6 to 8.

    Args:
        temperature: initial lambda, which is logged as ``ent_coef``; not a softmax temperature.
        target_entropy: beta, in nats. None: -A for Box actions of A dimensions, as in the paper; a fifth of
            the largest entropy for discrete actions.

    Raises:
        ValueError: if temperature is not finite and more than 0, or target_entropy is not finite.
    """

    paper: ClassVar[str] = "Zheng et al. 2022, arXiv:2202.05607"
    temperature: float = 0.1
    target_entropy: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and more than 0, got {self.temperature}")
        if self.target_entropy is not None and not math.isfinite(self.target_entropy):
            raise ValueError(f"target_entropy must be finite, or None, got {self.target_entropy}")

    def build(self, width: int, actions: BoxActions | DiscreteActions, features: int) -> "MaximumEntropyLoss":
        """Build the loss and its head; arguments as in `QRegularized.build`."""
        head: type[Any] = actions.select(continuous=SquashedGaussianHead, discrete=CategoricalHead)
        return MaximumEntropyLoss(head(width, actions), self.temperature, self.target_entropy)


class ImitationLoss(ObjectiveLoss):
    """Loss of `Imitation` with its action head."""

    def __init__(self, head: Head):
        super().__init__()
        self.head = head

    def forward(self, y: Tensor, actions: Tensor, weight: Tensor) -> dict[str, Tensor]:
        return {"loss": masked_mean(self.head.error(y, actions), weight)}


class MaximumEntropyLoss(ObjectiveLoss):
    """Loss of `MaximumEntropy` with its action head and log lambda."""

    head: StochasticHead

    def __init__(self, head: StochasticHead, temperature: float, target_entropy: float | None):
        super().__init__()
        self.head = head
        self.target_entropy = head.default_target_entropy() if target_entropy is None else target_entropy
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))

    def forward(self, y: Tensor, actions: Tensor, weight: Tensor) -> dict[str, Tensor]:
        error = masked_mean(self.head.error(y, actions), weight)
        entropy = masked_mean(self.head.entropy(y), weight)
        temperature = self.log_temperature.exp()
        dual = temperature * (entropy.detach() - self.target_entropy)
        parts = {"nll": error, "entropy": entropy, "ent_coef": temperature, "ent_coef_loss": dual}
        return {"loss": error - temperature.detach() * entropy + dual} | parts


@dataclass(frozen=True)
class QRegularized(ObjectiveSpec):
    r"""Imitation with a critic: ``error(a) - eta Q(s, pi(s)) / mean |Q|``.

    At step i of a window that ends at step n, two action values Q are trained on the target

        ``y_i = sum_(j=i)^(e-1) g^(j-i) r_j + g^(e-i) min Q'(s_e, pi(s_e))``,  ``e = n``,

    with two target networks ``Q' <- (1 - tau) Q' + tau Q``. After a terminal state there is no value
    (`window_targets`); a truncated episode is bootstrapped from its last state. With ``n_steps`` m, the
    return is shorter, ``e = min(i + m, n)``. The policy stays near the actions of the data and prefers those
    of high value. It can therefore combine parts of several episodes, which imitation alone cannot.

    The critic learns rewards in units of the agent's ``return_scale``, by default the standard deviation of
    the return-to-go. Training is thus independent of the unit of the rewards. A warning reports values beyond
    what the rewards allow (`DivergenceCheck`).

    Source: Hu et al. 2024, arXiv:2405.17098 (QT), section 4; with the normalization of TD3+BC (Fujimoto and
    Gu 2021, arXiv:2106.06860, section 4), and noise on target actions (TD3, arXiv:1802.09477, section 5.3).
    Other than in QT, target actions come from the trained policy and not from an average of it, |Q| is that
    of the first network, and the agent acts from one return instead of the best of several by Q.

    Args:
        eta: weight of the values, above 0; smaller values are closer to imitation.
        discount: discount factor of the values.
        target_rate: tau, the rate at which target networks follow.
        hidden_sizes: widths of the hidden layers of the action values.
        n_steps: largest number of rewards m in a target; None for all up to the end of the window, as in the
            paper. Fewer rewards have less bias from the actions of the data, and depend more on Q'.

    Raises:
        TypeError: if a number has the wrong type.
        ValueError: if eta or target_rate is not positive, target_rate is above 1, discount is not from 0 to
            below 1, n_steps is less than 1, or there are more than 100 hidden layers.
    """

    paper: ClassVar[str] = "Hu et al. 2024, arXiv:2405.17098"
    eta: float = 1.0
    discount: float = 0.99
    target_rate: float = 0.005
    hidden_sizes: tuple[int, ...] = (256, 256)
    n_steps: int | None = None

    def __post_init__(self) -> None:
        check_positive("QRegularized eta", self.eta)
        check_positive("QRegularized target_rate", self.target_rate)
        check_finite_number("QRegularized discount", self.discount)
        if self.target_rate > 1:
            raise ValueError(f"QRegularized target_rate must be at most 1, got {self.target_rate}")
        if not 0 <= self.discount < 1:
            raise ValueError(f"QRegularized discount must be from 0 to below 1, got {self.discount}")
        sizes = as_hidden_sizes("QRegularized hidden_sizes", self.hidden_sizes)
        object.__setattr__(self, "hidden_sizes", sizes)
        if self.n_steps is not None:
            check_int("QRegularized n_steps", self.n_steps)

    def check_windows(self, steps: int) -> None:
        if steps < 2:
            raise ValueError(
                f"objective={self} learns from the rewards between the steps of a window, got windows of one "
                f"step; use a DecisionTransformer with context_length of at least 2"
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
    """Loss of `QRegularized` with its action head, action values and target networks."""

    def __init__(self, spec: QRegularized, head: Head, critic: TwinQ):
        super().__init__()
        self.spec, self.head, self.critic = spec, head, critic
        self.target = frozen_copy(critic)
        self.divergence = DivergenceCheck(spec.discount)

    def check_data(self, data: Trajectories) -> None:
        """Raise DatasetError if all rewards are 0, or no episode is marked as terminated or truncated."""
        if not data.rewards.any():
            raise DatasetError(
                f"objective={self.spec} learns from rewards, but all {data.steps:,} rewards of the data are "
                f"0: record the rewards, or use objective=Imitation() or behavior cloning, which need none"
            )
        if not (data.terminated | data.truncated).any():
            raise DatasetError(
                f"objective={self.spec} learns where episodes end, but none of the {data.episodes:,} "
                f"episodes is terminated or truncated: mark their ends, or use objective=Imitation() or "
                f"behavior cloning, which need no ends"
            )

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
        batch, chosen = windows(), self.head.network_action(y)
        critic_loss, target = self._critic_loss(chosen.detach(), batch)
        frozen = {name: value.detach() for name, value in self.critic.named_parameters()}
        q = functional_call(self.critic, frozen, (batch.features.detach(), chosen))[0]
        value, scale = (masked_mean(x, batch.mask) for x in (q, q.detach().abs()))
        self.divergence.check(scale.item(), batch)
        loss = parts["loss"] - self.spec.eta * value / scale.clamp(min=SMALLEST_SCALE) + critic_loss
        return parts | {"loss": loss, "critic_loss": critic_loss, "q": value, "q_target": target}

    def _critic_loss(self, chosen: Tensor, windows: CriticWindows) -> tuple[Tensor, Tensor]:
        """Return the mean squared error of both action values, and the mean target."""
        x, spec = windows.features.detach(), self.spec
        used = -1 if spec.n_steps is None else slice(None)  # steps whose value targets use
        with torch.no_grad():
            action = self.head.add_target_noise(chosen[:, used])
            values = self.target(x[:, used], action).amin(dim=0).view(len(x), -1)
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

    @torch.no_grad()
    def after_update(self) -> None:
        """Move the target networks towards the action values."""
        for target, value in zip(self.target.buffers(), self.critic.parameters(), strict=True):
            target.lerp_(value, self.spec.target_rate)


Objective: TypeAlias = Imitation | MaximumEntropy | QRegularized
OBJECTIVES: dict[str, type[Objective]] = {
    choice.__name__: choice for choice in (Imitation, MaximumEntropy, QRegularized)
}


def objective_from_json(data: dict[str, Any]) -> Objective:
    """Restore an objective from the result of `rlxf.attention.registry.technique_to_json`.

    Raises:
        ValueError: if the name is unknown.
    """
    options = dict(data)
    name = options.pop("name", None)
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; use one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name](**options)
