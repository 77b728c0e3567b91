"""Sampling of the steps at which training windows start: uniform steps, uniform episodes, or by return."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlxf.data.findings import EQUAL_RETURNS, FEW_EPISODES, differ_beyond_rounding
from rlxf.utils.checks import check_between, check_positive, is_number
from rlxf.utils.warnings import warn_user


class SamplingScheme(ABC):
    """Base class of the probabilities with which training windows are drawn from episodes.

    A window is drawn in two stages: an episode, then one of its steps with equal probability.

    A subclass must be a frozen dataclass, because files hold its name and its fields. A file does not import
    it: ``load`` of an agent with a subclass of your own needs the argument ``sampling``.
    """

    @abstractmethod
    def episode_weights(
        self, lengths: NDArray[np.int64], returns: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """Return numbers proportional to the probabilities of E episodes, float64 (E,), at least 0.

        Args:
            lengths: number of steps of each episode, (E,).
            returns: return of each episode, (E,).

        Raises:
            ValueError: if these episodes cannot be sampled.
        """

    def checked_weights(
        self, lengths: NDArray[np.int64], returns: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """Return `episode_weights` after a check; arguments and errors are the same.

        Raises:
            ValueError: also unless the weights are one finite number for each episode, at least 0, and not
                all 0.
        """
        weights = np.asarray(self.episode_weights(lengths, returns), np.float64)
        valid = weights.shape == lengths.shape and bool((weights >= 0).all())
        if not (valid and 0 < weights.sum() < np.inf):
            raise ValueError(
                f"sampling={self} must weight {len(lengths)} episodes by finite numbers of at least 0, not "
                f"all 0, got {np.array2string(weights, threshold=6)} of shape {weights.shape}"
            )
        return weights


@dataclass(frozen=True)
class UniformSteps(SamplingScheme):
    """Draw each step with the same probability: ``p(episode) ~ length``. This is the default.

    Source: the reference implementation of Chen et al. 2021, arXiv:2106.01345.
    """

    paper: ClassVar[str] = "Chen et al. 2021, arXiv:2106.01345"

    def episode_weights(
        self, lengths: NDArray[np.int64], returns: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        return lengths.astype(np.float64)


@dataclass(frozen=True)
class UniformEpisodes(SamplingScheme):
    """Draw each episode with the same probability, then each of its steps: ``p(step) ~ 1 / length``.

    Short episodes then count as much as long ones. Use it if a few long episodes dominate the steps.
    """

    def episode_weights(
        self, lengths: NDArray[np.int64], returns: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        return np.ones(len(lengths))


@dataclass(frozen=True)
class ReturnWeighted(SamplingScheme):
    """Prefer steps of episodes with high returns: ``p(step) ~ exp(z / temperature)``.

    ``z = (R - R_min) / (R_max - R_min)`` is the return of the episode in units of the range in the data, so
    the temperature does not depend on the scale of rewards. A step of the best episode is drawn
    ``exp(1 / temperature)`` times as often as one of the worst: 22,026 times for 0.1, 2.7 times for 1. For
    high temperatures the probabilities approach those of `UniformSteps`.

    Source: Hong et al. 2023, arXiv:2306.13085, section 4 (return weighting, with returns scaled to [0, 1]).

    Args:
        temperature: above 0; lower values prefer high returns more strongly.

    Raises:
        TypeError: if temperature is not a number.
        ValueError: if it is not finite and above 0.
    """

    paper: ClassVar[str] = "Hong et al. 2023, arXiv:2306.13085"
    temperature: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", _as_float("ReturnWeighted temperature", self.temperature))
        check_positive("ReturnWeighted temperature", self.temperature)

    def episode_weights(
        self, lengths: NDArray[np.int64], returns: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """Return the weights; raise ValueError unless the returns `differ_beyond_rounding`."""
        below_best = _below_best(returns, self)
        weights: NDArray[np.float64] = lengths.astype(np.float64) * np.exp(below_best / self.temperature)
        return weights


@dataclass(frozen=True)
class HighReturns(SamplingScheme):
    """Draw the steps of episodes with high returns, all with the same probability; others are not drawn.

    These are the episodes with ``R >= R_max - range_fraction (R_max - R_min)``, up to rounding. Unlike a
    fraction of the episodes, such as ``best`` of `rlxf.BehaviorCloning`, this adapts to the data: all good
    episodes are used if there are many, and only good ones if there are few. Held-out episodes
    (``validation_fraction``) are of all returns, so their loss does not compare agents that imitate high
    returns only.

    Args:
        range_fraction: fraction of the range of returns below the best one, above 0 and at most 1. With 0.25,
            an episode is used if its return is in the upper quarter of the range.

    Raises:
        TypeError: if range_fraction is not a number.
        ValueError: if it is not above 0 and at most 1.
    """

    range_fraction: float = 0.25

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "range_fraction", _as_float("HighReturns range_fraction", self.range_fraction)
        )
        check_between("HighReturns range_fraction", self.range_fraction, 0, 1, inclusive="right")

    def episode_weights(
        self, lengths: NDArray[np.int64], returns: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """Return the weights; raise ValueError unless the returns `differ_beyond_rounding`.

        Warns:
            UserWarning: if fewer than ten episodes are used, and there are others.
        """
        is_high = _below_best(returns, self) >= -self.range_fraction - EQUAL_RETURNS
        if (used := int(is_high.sum())) < min(FEW_EPISODES, len(returns)):
            warn_user(
                f"sampling={self} uses {used} of {len(returns)} episodes, so the agent learns from little "
                f"data; a larger range_fraction uses more of them"
            )
        return lengths.astype(np.float64) * is_high


def _as_float(name: str, value: Any) -> float:
    """Return an option as a float, also if it is a NumPy scalar; raise TypeError if it is not a number."""
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def _below_best(returns: NDArray[np.float32], sampling: SamplingScheme) -> NDArray[np.float64]:
    """Return ``(R - R_max) / (R_max - R_min)``, from -1 to 0; raise ValueError if the returns are equal."""
    low, high = float(returns.min()), float(returns.max())
    if not differ_beyond_rounding(returns):
        raise ValueError(
            f"sampling={sampling} prefers high returns, but all {len(returns)} episodes to train on have the "
            f"return {low:g}; use sampling=UniformSteps() or UniformEpisodes()"
        )
    below_best: NDArray[np.float64] = (returns.astype(np.float64) - high) / (high - low)
    return below_best


UNIFORM_STEPS = UniformSteps()
"""The default."""
Sampling: TypeAlias = UniformSteps | UniformEpisodes | ReturnWeighted | HighReturns
"""Probabilities with which windows are drawn from a dataset."""
SAMPLINGS: dict[str, type[Sampling]] = {
    choice.__name__: choice for choice in (UniformSteps, UniformEpisodes, ReturnWeighted, HighReturns)
}
"""Name -> class of each choice of `Sampling`."""


class EpisodeSampler:
    """Draw steps from episodes with given probabilities.

    Args:
        first: first step of each episode, int64 (E,).
        lengths: number of steps of each episode, int64 (E,).
        weights: numbers proportional to the probabilities of the episodes, float64 (E,).
    """

    def __init__(self, first: NDArray[np.int64], lengths: NDArray[np.int64], weights: NDArray[np.float64]):
        self._first, self._lengths = torch.from_numpy(first), torch.from_numpy(lengths)
        cumulative = np.cumsum(weights)
        self._cumulative = torch.from_numpy(cumulative / cumulative[-1])

    def draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Draw steps, int64 (count,), with a CPU generator; None for torch's global generator."""
        uniform = torch.rand((2, count), generator=generator, dtype=torch.float64)
        episode = torch.searchsorted(self._cumulative, uniform[0], right=True)
        offset = (uniform[1] * self._lengths[episode]).long()
        return self._first[episode] + offset
