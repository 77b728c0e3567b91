"""Fitted Q evaluation: an ensemble of Q functions of a policy, trained on logged steps."""

from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import scipy.signal
import torch
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor

from rlxf.agents.common.numerics import clip_grad_norm_checked, numerical_error_context
from rlxf.data import Trajectories, as_trajectories
from rlxf.data.findings import UNUSED_REWARDS
from rlxf.off_policy_evaluation.networks import (
    PREDICTED_AT_ONCE,
    ContinuousQ,
    DiscreteQ,
    StepActions,
    StepFeatures,
    check_no_large_images,
    padded_steps,
    q_class,
)
from rlxf.utils.checks import PythonNumbers, check_between, check_int, check_positive
from rlxf.utils.errors import NumericalError
from rlxf.utils.matrix_products import float32_products

MAX_GRAD_NORM = 10.0
"""Largest gradient norm of the ensemble; larger gradients are clipped."""
DIVERGENCE_FACTOR = 10.0
"""Values above this multiple of the largest possible return count as divergence."""
LARGEST_OUTPUT = 2**24
"""Largest number of outputs of a pass over all steps, which limits its steps for many actions: 64 MiB."""


@dataclass(frozen=True)
class FittedQConfig(PythonNumbers):
    """Settings of fitted Q evaluation.

    Args:
        discount: gamma, above 0 and at most 1.
        updates: gradient steps. Values propagate backwards by about ``updates * target_rate`` steps, which
            should be several times the horizon ``1 / (1 - discount)``.
        members: number of Q functions M. Each is trained on its own resample of the episodes.
        batch_size: logged steps in an update of each member.
        learning_rate: learning rate of Adam at the first update; it decreases linearly to 0.
        width: features of a hidden layer.
        target_rate: Polyak coefficient tau of the target networks, above 0 and at most 1.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of range.
    """

    discount: float = 0.99
    updates: int = 20_000
    members: int = 5
    batch_size: int = 256
    learning_rate: float = 1e-3
    width: int = 128
    target_rate: float = 0.02

    def __post_init__(self) -> None:
        for name, least in (("updates", 1), ("members", 2), ("batch_size", 1), ("width", 2)):
            check_int(name, getattr(self, name), least=least)
        for name in ("discount", "target_rate"):
            check_between(name, getattr(self, name), 0, 1, inclusive="right")
        check_positive("learning_rate", self.learning_rate)


@dataclass(frozen=True, eq=False)
class StepValues:
    """Values of the N logged steps under the M members of an ensemble, in units of the rewards.

    Args:
        q: Q(s_t, a_t) of the logged actions, float64 (M, N).
        v: V(s_t), the value of the policy's own action, float64 (M, N).
    """

    q: NDArray[np.float64]
    v: NDArray[np.float64]

    def of_members(self, member: NDArray[np.int64]) -> "StepValues":
        """Return the values of one member for each step, as those of a single one; ``member`` is (N,)."""
        steps = np.arange(len(member))
        return StepValues(self.q[None, member, steps], self.v[None, member, steps])


def fit_q(
    data: Trajectories,
    policy_actions: Tensor,
    config: FittedQConfig = FittedQConfig(),
    return_to_go: NDArray[np.float64] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress_bar: bool = False,
    held_out: NDArray[np.bool_] | None = None,
) -> StepValues:
    r"""Fit Q functions of a policy to logged steps, and return their values at all steps.

    Each member minimizes ``(Q(s, a) - r - gamma Q'(s', pi(s')))^2`` over logged steps of its own resample of
    the episodes, where Q' is a Polyak average of Q and pi(s') the policy's action after the logged history.
    The last step of a terminated episode has the target r. The last step of a truncated episode is left out,
    because `Trajectories` do not contain the observation after it. Values are represented as ``c + sigma
    f(s, a)``, where c and sigma are mean and standard deviation of the discounted returns-to-go in the data
    (without held-out episodes), so results scale with the rewards. The averaged networks Q' give the result.

    Source: Le et al. 2019, arXiv:1903.08738, algorithm 3; resampled episodes: Hao et al. 2021,
    arXiv:2102.03607.

    Args:
        data: logged episodes.
        policy_actions: actions of the policy at the logged steps, as in `Replay`.
        config: settings.
        return_to_go: return-to-go that a return-conditioned policy observes, (N,); None for other policies.
        seed: seed of weights, resamples and batches; equal seeds give equal results on one device.
        device: device of the networks.
        progress_bar: show a progress bar.
        held_out: episodes that a member is not trained on, (M, E); None for none, see `folds_of_episodes`.

    Raises:
        ValueError: if no step can be used, all rewards are 0, or the discount is 1 and an episode is not
            terminated.
        DatasetError: if trajectories that were not loaded are invalid.
        TypeError: if observations are large images.
        NumericalError: if the values diverge; the message contains the remedy.
    """
    as_trajectories(data)
    check_data(data, config.discount)
    generator = torch.Generator().manual_seed(seed)
    batches = TransitionBatches(
        data, policy_actions, StepFeatures(data, return_to_go), config, generator, held_out
    )
    online = q_class(data.action_space)(
        members=config.members,
        features=batches.features.width,
        actions=batches.policy.width,
        width=config.width,
        generator=generator,
    ).to(device)
    average = deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=config.learning_rate)
    limit = DIVERGENCE_FACTOR * batches.largest_return()
    for update in track(range(config.updates), "fitted Q", disable=not progress_bar):
        optimizer.param_groups[0]["lr"] = config.learning_rate * (1 - update / config.updates)
        products = float32_products(config.batch_size * config.width**2, device)
        with numerical_error_context(f"fitted Q evaluation, update {update}"), products:
            largest = _update(online, average, optimizer, batches.sample().to(device))
            if update % 100 == 0:
                _check_divergence(float(largest), limit, batches)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(online.parameters()), config.target_rate)
    values = batches.values_of_all_steps(average, device)
    _check_divergence(float(np.abs((values.v - batches.center) / batches.scale).max()), limit, batches)
    return values


def check_data(data: Trajectories, discount: float) -> None:
    """Raise ValueError or TypeError unless values can be fitted to the data with this discount."""
    check_no_large_images(data)
    ids = ", ".join(data.dataset_ids) or "the dataset"
    if not np.any(data.rewards):
        raise ValueError(
            f"all rewards of {ids} are 0, so all policies have the return 0: use data with rewards"
        )
    if not data.complete_transitions.any():
        raise ValueError(
            f"no step of {ids} can be used: each episode has one step and is not terminated, so no next "
            f"observation is known; use longer episodes"
        )
    if not np.any(data.rewards[data.complete_transitions]):
        raise ValueError(f"all rewards other than 0 of {ids} are {UNUSED_REWARDS}")
    if discount == 1 and not data.terminated.all():
        raise ValueError(
            f"an undiscounted return (discount=1) needs episodes that all end in a terminal state, but "
            f"{int((~data.terminated).sum())} of {data.episodes} in {ids} do not: use a discount below 1"
        )


def discounted_returns_to_go(data: Trajectories, discount: float) -> NDArray[np.float64]:
    """Compute ``G_t = r_t + gamma G_(t+1)`` within each episode, (N,)."""
    rewards = np.split(data.rewards.astype(np.float64)[::-1], np.cumsum(data.lengths[::-1])[:-1])
    sums = [scipy.signal.lfilter([1.0], [1.0, -discount], episode) for episode in rewards]
    return np.concatenate(sums)[::-1]


@dataclass(frozen=True, eq=False)
class TransitionBatch:
    """Normalized transitions of the M members.

    Args:
        states: (M, B, D).
        actions: logged actions, (M, B, A).
        next_states: (M, B, D); unused where ``discount`` is 0.
        next_actions: actions of the policy in the next states, (M, B, A).
        rewards: normalized rewards, (M, B), so that the target is ``rewards + discount * f(next)``.
        discount: gamma, or 0 for terminal transitions, (M, B).
    """

    states: Tensor
    actions: Tensor
    next_states: Tensor
    next_actions: Tensor
    rewards: Tensor
    discount: Tensor

    def to(self, device: torch.device | str) -> "TransitionBatch":
        """Return a copy on another device."""
        return TransitionBatch(*(part.to(device) for part in vars(self).values()))


class TransitionBatches:
    """Random batches of logged transitions, each member's from its own resample of the episodes.

    Args:
        data: logged episodes.
        policy_actions: actions of the policy at each step, as in `Replay`.
        features: network inputs of the steps.
        config: settings.
        generator: source of resamples and batches.
        held_out: episodes that a member is not trained on, (M, E); None for none. A member without another
            usable step is trained on all of them.
    """

    def __init__(
        self,
        data: Trajectories,
        policy_actions: Tensor,
        features: StepFeatures,
        config: FittedQConfig,
        generator: torch.Generator,
        held_out: NDArray[np.bool_] | None = None,
    ):
        self.features = features
        self._config, self._generator = config, generator
        self._logged = StepActions.logged(data)
        self.policy = StepActions(policy_actions, data.action_space)
        self._horizon = _horizon(data, config.discount)
        self._rewards = data.rewards.astype(np.float64)
        counts = resample_counts(data.episodes, config.members, generator)
        allowed = np.ones_like(counts) if held_out is None else (~held_out).astype(counts.dtype)
        returns = discounted_returns_to_go(data, config.discount)
        scales = [_center_and_scale(returns[np.repeat(row > 0, data.lengths)]) for row in allowed]
        self.center, self.scale = np.array(scales).T[..., None]
        self._terminal = np.zeros(data.steps, np.bool_)
        self._terminal[data.offsets[1:][data.terminated] - 1] = True
        counts = _usable_counts(counts * allowed, allowed, data)
        weights = np.repeat(counts, data.lengths, axis=1) * data.complete_transitions
        steps = np.arange(data.steps)
        self._usable, mask = padded_steps([torch.from_numpy(np.repeat(steps, row)) for row in weights])
        self._usable_count = mask.sum(dim=1, keepdim=True)

    def largest_return(self) -> float:
        """Return a bound on the absolute normalized value of every policy."""
        largest = float(np.abs(self._rewards).max()) * self._horizon
        return float(((largest + np.abs(self.center)) / self.scale).max())

    def sample(self) -> TransitionBatch:
        """Draw a batch for each member."""
        steps = self._draw()
        following = np.minimum(steps + 1, len(self._rewards) - 1)
        discount = np.where(self._terminal[steps], 0.0, self._config.discount)
        rewards = (self._rewards[steps] - self.center + discount * self.center) / self.scale
        return TransitionBatch(
            states=self.features(steps),
            actions=self._logged(torch.from_numpy(steps)),
            next_states=self.features(following),
            next_actions=self.policy(torch.from_numpy(following)),
            rewards=torch.from_numpy(rewards).float(),
            discount=torch.from_numpy(discount).float(),
        )

    def _draw(self) -> NDArray[np.int64]:
        """Draw steps (M, B) with probabilities proportional to their counts in the resamples."""
        shape = len(self._usable), self._config.batch_size
        uniform = torch.rand(shape, generator=self._generator, dtype=torch.float64)
        return self._usable.gather(1, (uniform * self._usable_count).long()).numpy()

    @torch.no_grad()
    def values_of_all_steps(
        self, networks: DiscreteQ | ContinuousQ, device: torch.device | str
    ) -> StepValues:
        """Return the values of all steps in units of the rewards."""
        parts: list[Tensor] = []
        outputs = self._config.members * self.policy.width
        at_once = min(PREDICTED_AT_ONCE, max(1, LARGEST_OUTPUT // outputs))
        for steps in torch.arange(len(self._rewards)).split(at_once):
            states = self.features(steps.numpy()).to(device).expand(self._config.members, -1, -1)
            actions = torch.stack([self._logged(steps), self.policy(steps)])[:, None].to(device)
            each = [networks(states, one.expand(len(states), -1, -1)) for one in actions]
            parts.append(torch.stack(each).cpu())
        q, v = self.center + self.scale * torch.cat(parts, dim=-1).double().numpy()
        return StepValues(q, v)


def _center_and_scale(returns: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean and standard deviation of returns; another scale above 0 if they are equal."""
    center = float(returns.mean()) if len(returns) else 0.0
    return center, (float(returns.std()) if len(returns) else 0.0) or abs(center) or 1.0


def _usable_counts(
    counts: NDArray[np.int64], allowed: NDArray[np.int64], data: Trajectories
) -> NDArray[np.int64]:
    """Return counts of episodes (M, E) with a usable step: resamples, else allowed episodes, else all."""
    counts = np.where(_usable_in(counts, data), counts, allowed)
    return np.where(_usable_in(counts, data), counts, np.ones_like(counts))


def _usable_in(counts: NDArray[np.int64], data: Trajectories) -> NDArray[np.bool_]:
    """Return which resamples, (M, E), contain a usable step: (M, 1)."""
    usable = np.add.reduceat(data.complete_transitions.astype(np.int64), data.offsets[:-1])
    contains: NDArray[np.bool_] = (counts @ usable)[:, None] > 0
    return contains


def folds_of_episodes(episodes: int, folds: int, seed: int | np.random.SeedSequence) -> NDArray[np.int64]:
    """Assign each of E episodes to one of the folds of nearly equal size, at random: (E,).

    In cross-fitting, the Q function that is applied to an episode is trained without the episodes of its fold
    (Chernozhukov et al. 2018, "Double/debiased machine learning", section 3).
    """
    return np.random.default_rng(seed).permutation(episodes) % folds


def resample_counts(episodes: int, members: int, generator: torch.Generator) -> NDArray[np.int64]:
    """Return how often each of E episodes occurs in each of M resamples with replacement, int64 (M, E)."""
    drawn = torch.randint(episodes, (members, episodes), generator=generator)
    return torch.zeros_like(drawn).scatter_add_(1, drawn, torch.ones_like(drawn)).numpy()


def _horizon(data: Trajectories, discount: float) -> float:
    """Return the sum of the discount factors of an episode without end, or of the longest if they are 1."""
    return float(data.lengths.max()) if discount == 1 else 1 / (1 - discount)


def _update(
    online: DiscreteQ | ContinuousQ,
    average: DiscreteQ | ContinuousQ,
    optimizer: torch.optim.Optimizer,
    batch: TransitionBatch,
) -> Tensor:
    """Take a gradient step, and return the largest absolute target."""
    with torch.no_grad():
        target = batch.rewards + batch.discount * average(batch.next_states, batch.next_actions)
    loss = (online(batch.states, batch.actions) - target).square().mean(dim=1).sum()
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_checked({"loss": loss}, online, online.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return target.abs().max()


def _check_divergence(largest: float, limit: float, batches: TransitionBatches) -> None:
    """Raise NumericalError if normalized values exceed what any policy can reach."""
    if largest <= limit:
        return
    scale = float(batches.scale.max())
    bound = limit / DIVERGENCE_FACTOR * scale
    raise NumericalError(
        f"the Q values diverge: they reach {largest * scale:.3g}, but no policy has a return above "
        f"{bound:.3g}. The policy takes actions that are far from the data: lower the discount, add episodes "
        f"with similar actions, or lower the target_rate and the learning_rate"
    )
