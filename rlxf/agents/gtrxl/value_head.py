"""Linear value head whose outputs are normalized by statistics of the returns (PopArt)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rlxf.training import CheckpointError

LEAST_DEVIATION = 1e-2
"""Lower bound of the standard deviation of returns.

Before the first nonzero reward, returns are only the critic's own noise, which must not be amplified.
"""
LEAST_RATE = 0.05
"""Weight of the newest rollout in the statistics after the first 20 rollouts."""

MEAN = "value_net.mean"
MOST = {
    MEAN: torch.finfo(torch.float32).max,
    "value_net.variance": torch.finfo(torch.float32).max ** 2,
    "value_net.rollouts": torch.iinfo(torch.int64).max,
}
"""Largest absolute values of the statistics, by their names in the weights of a policy."""


def check_statistics(state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the statistics in the weights are invalid for `PopArtHead`.

    Mean and standard deviation must be finite in float32, the dtype of values.

    Args:
        state: the policy's ``state_dict``.
    """
    for name, most in MOST.items():
        if name not in state:
            continue
        value = state[name].item()
        if name != MEAN and not value >= 0:
            raise CheckpointError(f"its weight {name} must be at least 0, got {value}")
        if not abs(value) <= most:
            raise CheckpointError(f"its weight {name} must be a number of at most {most:.3g}, got {value}")


class PopArtHead(nn.Linear):
    r"""``V = mu + sigma (w^T h + b)``, with the mean mu and standard deviation sigma of the returns.

    The linear layer predicts targets of mean 0 and variance 1 for any scale of the rewards. The same learning
    rate therefore works for returns of 1 and of -1000. `update` moves mu and sigma to the returns of a
    rollout and rescales w and b so that all values are preserved: ``w' = sigma w / sigma'`` and
    ``b' = (sigma b + mu - mu') / sigma'``.

    The first 20 rollouts have equal weights in the statistics. Afterwards the statistics are an exponential
    moving average, so that the large returns of an early policy lose their influence on the scale.

    Source: van Hasselt et al. 2016, arXiv:1602.07714, section 2 ("preserving outputs precisely").

    Args:
        width: features C of the transformer's outputs.
    """

    mean: Tensor
    variance: Tensor
    rollouts: Tensor

    def __init__(self, width: int):
        super().__init__(width, 1)
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("variance", torch.ones((), dtype=torch.float64))
        self.register_buffer("rollouts", torch.zeros((), dtype=torch.int64))

    @property
    def deviation(self) -> Tensor:
        """Standard deviation sigma, at least `LEAST_DEVIATION`; a float64 scalar."""
        return self.variance.sqrt().clamp(min=LEAST_DEVIATION)

    def forward(self, latent: Tensor) -> Tensor:
        """Return the values of outputs (..., C), in units of the rewards: (..., 1)."""
        mean, deviation = self.mean.to(latent.dtype), self.deviation.to(latent.dtype)
        return mean + deviation * super().forward(latent)

    @torch.no_grad()
    def update(self, returns: Tensor) -> None:
        """Update the statistics with the returns (N,) of a rollout; all values are preserved."""
        mean, deviation = self.mean.clone(), self.deviation
        self._update_statistics(returns.double())
        ratio = deviation / self.deviation
        self.weight.mul_(ratio.to(self.weight.dtype))
        bias = ratio * self.bias.double() + (mean - self.mean) / self.deviation
        self.bias.copy_(bias)

    def _update_statistics(self, returns: Tensor) -> None:
        self.rollouts += 1
        rate = torch.clamp(1 / self.rollouts.double(), min=LEAST_RATE)
        mean = torch.lerp(self.mean, returns.mean(), rate)
        before = self.variance + (self.mean - mean).square()
        newest = (returns - mean).square().mean()
        self.variance.copy_(torch.lerp(before, newest, rate))
        self.mean.copy_(mean)
