"""Behavior policy of logged episodes with discrete actions, estimated by behavior cloning."""

import math

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from rlxf.agents.common.actions import DiscreteActions, action_encoder
from rlxf.agents.common.losses import cross_entropies
from rlxf.agents.common.numerics import clip_grad_norm_checked
from rlxf.data import Trajectories
from rlxf.off_policy_evaluation.fitted_q import folds_of_episodes
from rlxf.off_policy_evaluation.networks import PREDICTED_AT_ONCE, EnsembleMLP, StepFeatures, padded_steps

UPDATES, BATCH_SIZE, LEARNING_RATE, WIDTH = 2000, 256, 1e-3, 64
"""Settings of the clone: Adam with a learning rate that decreases linearly to 0."""
MIN_PROBABILITY = 1e-3
"""Smallest estimated probability of a logged action; it bounds the importance ratio of a step by 1000."""
FOLDS = 5
"""Default number of folds of episodes; for each, a clone is trained on the other folds."""
VALIDATION_FRACTION, VALIDATION_INTERVAL, MAX_VALIDATION_STEPS = 0.2, 100, 10_000
"""Part of the training steps of a clone that selects its number of updates, and updates between the tests."""


def estimate_behavior(
    data: Trajectories,
    seed: int = 0,
    device: torch.device | str = "cpu",
    updates: int = UPDATES,
    folds: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """Return the estimated probability mu(a_t | s_t) of each logged action, (N,), at least `MIN_PROBABILITY`.

    A network with one softmax for each discrete component is trained by cross-entropy on the logged actions.
    It observes s_t only, so it averages over different behavior policies and over what they remember.

    The probabilities of an episode come from a network that was trained on the other folds, because a network
    gives the actions on which it was trained a too high probability. The last fifth of its training steps, in
    a random order of episodes, is not in its batches: every 100 updates the cross-entropy is measured there,
    and the weights are kept if it is smaller by more than a standard error. At first the network gives all
    states the frequencies of the actions in its training steps, so few data without a pattern give these.

    Args:
        data: logged episodes with Discrete, MultiDiscrete or MultiBinary actions, at least two.
        seed: seed of weights, folds and batches.
        device: device of the network.
        updates: largest number of gradient steps.
        folds: fold of each episode, (E,), with at least two different numbers; None for 5 random folds.

    Raises:
        ValueError: if all episodes are in one fold.
    """
    if folds is None:
        folds = folds_of_episodes(data.episodes, FOLDS, seed)
    numbers, folds = np.unique(folds, return_inverse=True)
    if len(numbers) < 2:
        raise ValueError(
            f"probabilities of actions are estimated from the episodes of other folds, got {data.episodes} "
            f"episodes in one fold; use at least two episodes in different folds, or give the probabilities"
        )
    clones = BehaviorClones(data, folds, torch.Generator().manual_seed(seed), device)
    clones.train(updates)
    return np.maximum(clones.probabilities(), MIN_PROBABILITY)


class BehaviorClones:
    """Networks that predict the logged actions, one for each of M folds, trained on the other folds.

    Args:
        data: logged episodes.
        folds: fold of each episode, from 0 to M - 1, (E,).
        generator: source of weights, order of episodes and batches.
        device: device of the networks.
    """

    def __init__(
        self,
        data: Trajectories,
        folds: NDArray[np.int64],
        generator: torch.Generator,
        device: torch.device | str,
    ):
        encoder = action_encoder(data.action_space)
        assert isinstance(encoder, DiscreteActions)
        self._features, self._sizes = StepFeatures(data), encoder.sizes
        self._choices = encoder.to_choices(torch.from_numpy(np.array(data.actions)))
        self._generator, self._device = generator, device
        members = int(folds.max()) + 1
        own = [np.flatnonzero(folds == fold) for fold in range(members)]
        self._own = [torch.from_numpy(data.steps_of(episodes)) for episodes in own]
        others = [_shuffled(np.flatnonzero(folds != fold), generator) for fold in range(members)]
        parts = [_without_last(torch.from_numpy(data.steps_of(episodes))) for episodes in others]
        self._training, self._validation = ([*part] for part in zip(*parts, strict=True))
        self._network = EnsembleMLP(members, self._features.width, WIDTH, sum(self._sizes), generator)
        self._start_at_frequencies()
        self._network.to(device)

    @torch.no_grad()
    def _start_at_frequencies(self) -> None:
        """Set the outputs to the logarithms of ``count + 1`` of each choice in the training steps."""
        self._network.out.weight.zero_()
        for steps, bias in zip(self._training, self._network.out.bias[:, 0], strict=True):
            columns = zip(self._choices[steps].unbind(-1), self._sizes, strict=True)
            counts = [torch.bincount(choices, minlength=size) for choices, size in columns]
            bias.copy_((torch.cat(counts) + 1).log())

    def train(self, updates: int) -> None:
        """Train the networks, and give each the weights with its smallest validation error."""
        optimizer = torch.optim.Adam(self._network.parameters(), lr=LEARNING_RATE)
        training, mask = padded_steps(self._training)
        counts = mask.sum(dim=1, keepdim=True)
        best = _BestWeights(self._network, self._errors_of(self._validation))
        for update in range(updates):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - update / updates)
            uniform = torch.rand(len(counts), BATCH_SIZE, generator=self._generator, dtype=torch.float64)
            loss = self._errors(training.gather(1, (uniform * counts).long())).mean(dim=1).sum()
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_checked({"loss": loss}, self._network, self._network.parameters(), math.inf)
            optimizer.step()
            if (update + 1) % VALIDATION_INTERVAL == 0 or update + 1 == updates:
                best.update(self._errors_of(self._validation))
        best.restore()

    def _errors(self, steps: Tensor) -> Tensor:
        """Return the cross-entropy of the logged actions of steps (M, B) under the M networks, (M, B)."""
        features = self._features(steps.numpy()).to(self._device)
        logits = self._network(features).split(self._sizes, dim=-1)
        return cross_entropies(logits, self._choices[steps].to(self._device))

    @torch.no_grad()
    def _errors_of(self, steps: list[Tensor]) -> list[Tensor]:
        """Return the cross-entropies of each network at its own steps, M tensors (n_m,)."""
        index, mask = padded_steps(steps)
        at_once = max(1, PREDICTED_AT_ONCE // len(steps))
        errors = torch.cat([self._errors(part).cpu() for part in index.split(at_once, dim=1)], dim=1)
        return [row[kept] for row, kept in zip(errors, mask, strict=True)]

    def probabilities(self) -> NDArray[np.float64]:
        """Return the probability of each logged action under the network trained without its fold, (N,)."""
        result = torch.empty(len(self._choices), dtype=torch.float64)
        for steps, errors in zip(self._own, self._errors_of(self._own), strict=True):
            result[steps] = errors.double().neg().exp()
        return result.numpy()


class _BestWeights:
    """Weights of each member of an ensemble with the smallest validation error, at first the present ones.

    Args:
        network: the ensemble of M members.
        errors: present errors of each member at its validation steps, M tensors (n_m,).
    """

    def __init__(self, network: EnsembleMLP, errors: list[Tensor]):
        self._parameters = list(network.parameters())
        self._weights = [parameter.detach().clone() for parameter in self._parameters]
        self._errors = errors

    def update(self, errors: list[Tensor]) -> None:
        """Keep the present weights of the members whose errors, M tensors (n_m,), are clearly smaller."""
        for member, (new, old) in enumerate(zip(errors, self._errors, strict=True)):
            if _is_smaller(new, old):
                self._errors[member] = new
                for kept, parameter in zip(self._weights, self._parameters, strict=True):
                    kept[member] = parameter.detach()[member]

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the best weights into the network."""
        for kept, parameter in zip(self._weights, self._parameters, strict=True):
            parameter.copy_(kept)


def _is_smaller(errors: Tensor, others: Tensor) -> bool:
    """Return whether the mean of errors (n,) is smaller by more than the standard error of the difference."""
    gain = others - errors
    return len(gain) > 1 and bool(gain.mean() > gain.std() / len(gain) ** 0.5)


def _shuffled(episodes: NDArray[np.int64], generator: torch.Generator) -> NDArray[np.int64]:
    """Return episodes in a random order."""
    order: NDArray[np.int64] = episodes[torch.randperm(len(episodes), generator=generator).numpy()]
    return order


def _without_last(steps: Tensor) -> tuple[Tensor, Tensor]:
    """Split steps (n,) into those to train on and the last fifth, of at most 10,000, to validate on."""
    held_out = min(int(VALIDATION_FRACTION * len(steps)), MAX_VALIDATION_STEPS)
    first = len(steps) - held_out
    return steps[:first], steps[first:]


def check_probabilities(probabilities: ArrayLike, data: Trajectories) -> NDArray[np.float64]:
    """Return given behavior probabilities as float64 (N,).

    Raises:
        ValueError: if there is not one for each step, or one is not above 0 and at most 1.
    """
    try:
        values = np.asarray(probabilities, np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"behavior_probabilities must be the probability of each logged action, {data.steps} numbers "
            f"above 0 and at most 1; got {type(probabilities).__name__}"
        ) from None
    if values.shape != (data.steps,) or not ((values > 0) & (values <= 1)).all():
        raise ValueError(
            f"behavior_probabilities must be the probability of each logged action, above 0 and at most 1, "
            f"with shape ({data.steps},); got shape {values.shape} with values from "
            f"{values.min(initial=np.inf):g} to {values.max(initial=-np.inf):g}"
        )
    return values
