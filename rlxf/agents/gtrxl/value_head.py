"""Value head of GTrXLPolicy, in units of the returns (PopArt)."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rlxf.training import CheckpointError

MIN_STD = 1e-2
"""Lower bound of the standard deviation of returns, in `UNITS` given by the largest absolute return.

While all rewards are 0, returns are only the critic's own noise, which must not be amplified.
"""
UNITS = 1e-12, 1.0
"""Smallest and largest unit of `MIN_STD`. The square of a smaller one divides float32 numbers to infinity."""
MIN_RATE = 0.05
"""Weight of the newest rollout in the statistics after the first 20 rollouts."""
MAX_GROWTH = 100.0
"""Bound of a new largest absolute return in the statistics, in standard deviations above that of the mean."""

MEAN_KEY = "value_net.mean"
MAX_STATISTICS = {
    MEAN_KEY: torch.finfo(torch.float32).max,
    "value_net.variance": torch.finfo(torch.float32).max ** 2,
    "value_net.largest": torch.finfo(torch.float32).max,
    "value_net.rollouts": torch.iinfo(torch.int64).max,
}
"""Largest absolute values of the statistics, by their names in the weights of a policy."""


def check_statistics(state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the statistics in the weights are invalid for `PopArtHead`.

    Mean and standard deviation must be finite in float32, the dtype of values.

    Args:
        state: the policy's ``state_dict``.
    """
    for name, maximum in MAX_STATISTICS.items():
        if name not in state:
            continue
        value = state[name].item()
        if name != MEAN_KEY and not value >= 0:
            raise CheckpointError(f"its weight {name} must be at least 0, got {value}")
        if not abs(value) <= maximum:
            raise CheckpointError(f"its weight {name} must be a number of at most {maximum:.3g}, got {value}")


class PopArtHead(nn.Linear):
    r"""``V = mu + sigma (w^T h + b)``, with the mean mu and standard deviation sigma of the returns.

    The linear layer predicts targets of mean 0 and variance 1 for any scale of the rewards. The same learning
    rate therefore works for returns of 1 and of -1000. `update` moves mu and sigma to the returns of a
    rollout and rescales w and b so that all values are preserved: ``w' = sigma w / sigma'`` and
    ``b' = (sigma b + mu - mu') / sigma'``.

    The weights of a new agent are 0, so all its values are 0 until the first update with a nonzero return,
    which sets them to mu. Training therefore does not depend on the unit of the rewards, if sigma exceeds
    its lower bound, or the largest return is between the `UNITS`.

    The first 20 rollouts have equal weights in the statistics. Afterwards the statistics are an exponential
    moving average, so that the large returns of an early policy lose their influence on the scale.

    A single outlier would set the scale for hundreds of rollouts. In the statistics, absolute returns are
    therefore at most ``max(largest, |mu| + 100 sigma)``, with the largest one of earlier rollouts. The first
    nonzero returns count in full. Those of a task with much larger rewards do so after few rollouts.

    Source: van Hasselt et al. 2016, arXiv:1602.07714, section 2 ("preserving outputs precisely").

    Args:
        width: features C of the transformer's outputs.
    """

    mean: Tensor
    variance: Tensor
    largest: Tensor
    rollouts: Tensor

    def __init__(self, width: int):
        super().__init__(width, 1)
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("variance", torch.ones((), dtype=torch.float64))
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))
        self.register_buffer("rollouts", torch.zeros((), dtype=torch.int64))

    @property
    def deviation(self) -> Tensor:
        """Standard deviation sigma with the lower bound `MIN_STD`; a float64 scalar above 0."""
        unit = torch.where(self.largest > 0, self.largest.clamp(*UNITS), 1.0)
        return torch.maximum(self.variance.sqrt(), MIN_STD * unit)

    def forward(self, latent: Tensor) -> Tensor:
        """Return the values of outputs (..., C), in units of the rewards: (..., 1)."""
        mean, deviation = self.mean.to(latent.dtype), self.deviation.to(latent.dtype)
        return mean + deviation * super().forward(latent)

    @torch.no_grad()
    def update(self, returns: Tensor) -> bool:
        """Update the statistics with the returns (N,) of a rollout; all values are preserved.

        If all weights are 0, as in a new agent, the values become mu instead.

        Returns:
            Whether the values are preserved.
        """
        mean, deviation = self.mean.clone(), self.deviation
        self._update_statistics(returns.double())
        if not self.weight.any():
            return False
        ratio = deviation / self.deviation
        self.weight.mul_(ratio.to(self.weight.dtype))
        bias = ratio * self.bias.double() + (mean - self.mean) / self.deviation
        self.bias.copy_(bias)
        return True

    def _update_statistics(self, returns: Tensor) -> None:
        returns = self._without_outliers(returns)
        self.rollouts += 1
        self.largest.copy_(torch.maximum(self.largest, returns.abs().max()))
        rate = torch.clamp(1 / self.rollouts.double(), min=MIN_RATE)
        mean = torch.lerp(self.mean, returns.mean(), rate)
        before = self.variance + (self.mean - mean).square()
        newest = (returns - mean).square().mean()
        self.variance.copy_(torch.lerp(before, newest, rate))
        self.mean.copy_(mean)

    def _without_outliers(self, returns: Tensor) -> Tensor:
        """Clip returns (N,) that exceed both all earlier ones and the bound of `MAX_GROWTH`."""
        bound = torch.maximum(self.largest, self.mean.abs() + MAX_GROWTH * self.deviation)
        bound = torch.where(self.largest > 0, bound, math.inf)
        return returns.clamp(-bound, bound)
