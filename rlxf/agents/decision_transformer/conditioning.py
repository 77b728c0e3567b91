"""Return on which a Decision Transformer is conditioned: a given target, or a prediction of the model."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.utils.checks import PythonNumbers, check_between, check_int, check_not_negative


class ReturnHead(nn.Module, ABC):
    """Base class of predictions of the return-to-go from the outputs y of the transformer at state tokens.

    Args:
        width: width C of the transformer.
        outputs: numbers that the linear layer predicts.
    """

    def __init__(self, width: int, outputs: int):
        super().__init__()
        self.net = nn.Linear(width, outputs)

    @abstractmethod
    def fit(self, return_to_go: NDArray[np.float32]) -> None:
        """Set the buffers that depend on the returns-to-go (N,) of the data."""

    @abstractmethod
    def error(self, y: Tensor, return_to_go: Tensor) -> Tensor:
        """Compute the loss of each prediction: y (..., C) and returns-to-go (...) of the data -> (...)."""

    @abstractmethod
    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Return the return-to-go on which to condition the action, for y (..., C) -> (...)."""


class ExpectileHead(ReturnHead):
    """Return head of `MaxReturn`; it predicts the return-to-go in units of its range in the data."""

    low: Tensor
    span: Tensor

    def __init__(self, width: int, expectile: float):
        super().__init__(width, 1)
        self.expectile = expectile
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("span", torch.ones(()))

    @torch.no_grad()
    def fit(self, return_to_go: NDArray[np.float32]) -> None:
        low, high = float(return_to_go.min()), float(return_to_go.max())
        self.low.fill_(low)
        self.span.fill_(high - low or 1.0)

    def error(self, y: Tensor, return_to_go: Tensor) -> Tensor:
        return expectile_loss((return_to_go - self.low) / self.span - self.net(y)[..., 0], self.expectile)

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        predicted: Tensor = self.low + self.span * self.net(y)[..., 0]
        return predicted

    def spread(self, number: int) -> Tensor:
        """Return evenly spaced returns from the smallest to the largest of the data, (number,)."""
        return self.low + self.span * torch.linspace(0, 1, number, device=self.low.device)


class DistributionHead(ReturnHead):
    """Return head of `SampledReturn`, a categorical distribution over values of the return-to-go."""

    values: Tensor

    def __init__(self, width: int, bins: int, optimality: float):
        super().__init__(width, bins)
        self.optimality = optimality
        self.register_buffer("values", torch.zeros(bins))

    @torch.no_grad()
    def fit(self, return_to_go: NDArray[np.float32]) -> None:
        """Set the values of the bins: evenly spaced from the smallest to the largest return-to-go."""
        low, high = float(return_to_go.min()), float(return_to_go.max())
        self.values.copy_(torch.linspace(low, high, len(self.values)))

    def error(self, y: Tensor, return_to_go: Tensor) -> Tensor:
        target = (return_to_go[..., None] - self.values).abs().argmin(dim=-1)
        logits: Tensor = self.net(y)
        return F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Return the mean of the tilted distribution, or a sample from torch's global generator."""
        p = self.tilted_probabilities(y)
        if deterministic:
            return p @ self.values
        index = torch.multinomial(p.flatten(0, -2), 1).view(p.shape[:-1])
        return self.values[index]

    def tilted_probabilities(self, y: Tensor) -> Tensor:
        """Compute ``p(R) exp(kappa (R - R_min) / (R_max - R_min)) / Z`` of the N values, (..., N)."""
        fraction = torch.linspace(0, 1, len(self.values), device=y.device, dtype=y.dtype)
        tilted: Tensor = (self.net(y) + self.optimality * fraction).softmax(dim=-1)
        return tilted


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """Compute ``|m - 1(u < 0)| u^2`` of differences u between target and prediction, elementwise.

    The prediction that minimizes its mean is the m-expectile of the targets: their mean for m = 0.5, and a
    number near their maximum for m near 1.

    Source: Newey and Powell 1987, Econometrica 55(4).
    """
    return torch.where(difference < 0, 1 - expectile, expectile) * difference.square()


@dataclass(frozen=True)
class TargetReturn:
    """Condition actions on a target return minus the rewards so far; the user chooses the target.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3.
    """

    paper: ClassVar[str] = "Chen et al. 2021, arXiv:2106.01345"
    needs_target: ClassVar[bool] = True

    def acting_windows(self, context_length: int) -> int:
        """Return 1, see `PredictedReturn.acting_windows`."""
        return 1


class PredictedReturn(PythonNumbers, ABC):
    """Base class of conditionings on a return that the model predicts from the history and the state.

    The state token therefore comes before the return token, whose output predicts the action. The return
    token also contains the state (`rlxf.agents.decision_transformer.predicted_return.StateFirstTokens`).
    """

    needs_target: ClassVar[bool] = False

    @abstractmethod
    def build(self, width: int) -> ReturnHead:
        """Build the head that predicts the return from outputs of this width."""

    def acting_windows(self, context_length: int) -> int:
        """Return the number of windows of this length that a step of one environment processes at once."""
        return 1


@dataclass(frozen=True)
class MaxReturn(PredictedReturn):
    r"""Condition actions on the largest return-to-go that the data contain after a similar history.

    The model predicts the m-expectile of the return-to-go at each state token, with the loss
    ``|m - 1(u < 0)| u^2`` (`expectile_loss`). For m near 1, this is near the largest return that follows
    similar histories. No target has to be chosen: each start of an episode gets its own.

    Source: Zhuang et al. 2024, arXiv:2405.08740 (Reinformer), section 4.

    Args:
        expectile: m, between 0.5 and 1. Larger values are closer to the maximum, and noisier.

    Raises:
        TypeError: if expectile is not a number.
        ValueError: unless it is at least 0.5 and less than 1.
    """

    paper: ClassVar[str] = "Zhuang et al. 2024, arXiv:2405.08740"
    expectile: float = 0.99

    def __post_init__(self) -> None:
        check_between("MaxReturn expectile", self.expectile, 0.5, 1, inclusive="left")

    def build(self, width: int) -> ExpectileHead:
        return ExpectileHead(width, self.expectile)


@dataclass(frozen=True)
class ElasticHistory(MaxReturn):
    r"""`MaxReturn` that acts from a part of its history: that with the largest predicted return.

    With less history, the prediction depends less on what happened before, so a good continuation of another
    episode in the data is found more easily. The model compares the last K, K - step, K - 2 step ... steps.

    Source: Wu et al. 2023, arXiv:2307.02484 (Elastic Decision Transformer), section 4.

    Args:
        expectile: see `MaxReturn`.
        step: difference of two history lengths, in steps. An acting step costs about K / step times as much
            as with `MaxReturn`.

    Raises:
        TypeError: if expectile is not a number, or step is not an int.
        ValueError: if expectile is not from 0.5 to below 1, or step is less than 1.
    """

    paper: ClassVar[str] = "Wu et al. 2023, arXiv:2307.02484"
    step: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("ElasticHistory step", self.step)

    def acting_windows(self, context_length: int) -> int:
        return -(-context_length // self.step)


@dataclass(frozen=True)
class HighestValueReturn(MaxReturn):
    r"""`MaxReturn` that acts for that return, of several, whose action has the highest value of a critic.

    The candidates are the return that `MaxReturn` predicts, and returns evenly spaced from the smallest to
    the largest return-to-go of the data. The policy chooses an action a for each of them, and the one with
    the largest ``min_i Q_i(s, a)`` is taken. A return that the data never contain after this history can thus
    be chosen where its action is better. The objective must be `QRegularized`, which trains the critic.

    Source: Hu et al. 2024, arXiv:2405.17098 (QT), section 4, where the user gives the candidates.

    Args:
        expectile: see `MaxReturn`.
        candidates: number of evenly spaced returns. An acting step costs about (3 + candidates) / 2 times as
            much as with `MaxReturn`.

    Raises:
        TypeError: if expectile is not a number, or candidates is not an int.
        ValueError: if expectile is not from 0.5 to below 1, or candidates is less than 2.
    """

    paper: ClassVar[str] = "Hu et al. 2024, arXiv:2405.17098"
    candidates: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("HighestValueReturn candidates", self.candidates, least=2)

    def acting_windows(self, context_length: int) -> int:
        return 1 + self.candidates


@dataclass(frozen=True)
class SampledReturn(PredictedReturn):
    r"""Condition actions on a return drawn from ``p(R | history) exp(kappa (R - R_min) / (R_max - R_min))``.

    The model predicts the distribution of the return-to-go at each state token, over evenly spaced values
    from R_min to R_max, those of the data. The second factor prefers high returns. With
    ``deterministic=True``, `predict` uses the mean of this distribution. In `learn_online`, returns above
    R_max count as R_max, so the agent does not ask for more than the best return of the dataset.

    Source: Lee et al. 2022, arXiv:2205.15241 (Multi-Game Decision Transformers), section 3.3.

    Args:
        bins: number of values.
        optimality: kappa; 0 imitates the data, larger values prefer higher returns.

    Raises:
        TypeError: if bins is not an int, or optimality is not a number.
        ValueError: if bins is less than 2, or optimality is negative or not finite.
    """

    paper: ClassVar[str] = "Lee et al. 2022, arXiv:2205.15241"
    bins: int = 100
    optimality: float = 10.0

    def __post_init__(self) -> None:
        check_int("SampledReturn bins", self.bins, least=2)
        check_not_negative("SampledReturn optimality", self.optimality)

    def build(self, width: int) -> DistributionHead:
        return DistributionHead(width, self.bins, self.optimality)


Conditioning: TypeAlias = TargetReturn | MaxReturn | ElasticHistory | HighestValueReturn | SampledReturn
CONDITIONINGS: dict[str, type[Conditioning]] = {
    choice.__name__: choice
    for choice in (TargetReturn, MaxReturn, ElasticHistory, HighestValueReturn, SampledReturn)
}
