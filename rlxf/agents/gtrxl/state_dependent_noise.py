"""Generalized state-dependent exploration (gSDE) for Box actions."""

import math

import torch
from gymnasium import Space, spaces
from stable_baselines3.common.distributions import DiagGaussianDistribution
from torch import Tensor, nn
from torch.distributions import Normal

MIN_VARIANCE = 1e-6
"""Number that is added to the variance of actions, as in SB3, so that densities stay finite."""


class StateDependentNoise(DiagGaussianDistribution):
    r"""Gaussian actions ``a = mu(y) + \theta^T y``, whose noise matrix theta is kept for several steps.

    The entries of theta (C, A) are drawn from ``N(0, sigma^2)``, with learned deviations sigma (C, A). Given
    the outputs y (C,) of the transformer, an action is therefore Gaussian with variance ``(y^2)^T sigma^2``.
    `explore` keeps a matrix for several steps, so that the noise is a function of the state instead of
    independent in each step. It reaches distant states where independent noise averages out, such as in
    MountainCarContinuous. `sample` draws independent noise of the same distribution.

    No gradient flows through y into the noise.

    Source: Raffin et al. 2022, arXiv:2005.05719, section 3.

    Args:
        action_dim: number of dimensions A of the actions.
    """

    _features: Tensor
    _noise: Tensor | None = None

    def proba_distribution_net(
        self, latent_dim: int, log_std_init: float = 0.0
    ) -> tuple[nn.Module, nn.Parameter]:
        """Return the layer of the means, and the log deviations (C, A) of the noise matrix.

        Args:
            latent_dim: features C of the transformer's outputs.
            log_std_init: initial log standard deviation of actions, as without state-dependent noise, for
                outputs of variance 1. Those of the last normalization have it; with ``final_norm=False``,
                the deviation is larger or smaller in proportion to the outputs.
        """
        entry = log_std_init - 0.5 * math.log(latent_dim)
        log_std = torch.full((latent_dim, self.action_dim), entry)
        return nn.Linear(latent_dim, self.action_dim), nn.Parameter(log_std)

    def proba_distribution(  # type: ignore[override]
        self, mean_actions: Tensor, log_std: Tensor, features: Tensor
    ) -> "StateDependentNoise":
        """Set the parameters of N action distributions, and return this object.

        Args:
            mean_actions: (N, A).
            log_std: (C, A), log deviations of the noise matrix.
            features: (N, C), outputs of the transformer.
        """
        self._features = features.detach()
        variance = self._features.square() @ (2 * log_std).exp()
        self.distribution = Normal(mean_actions, (variance + MIN_VARIANCE).sqrt())
        return self

    @torch.no_grad()
    def draw_noise(self, log_std: Tensor, rows: int) -> None:
        """Draw the noise matrices of ``rows`` environments, for `explore` until the next call."""
        noise = torch.randn(rows, *log_std.shape, dtype=log_std.dtype, device=log_std.device)
        self._noise = noise * log_std.exp()

    def explore(self) -> Tensor:
        """Return the actions (N, A) of N environments with their noise matrices of `draw_noise`."""
        assert self._noise is not None
        return self.distribution.mean + torch.einsum("nc,nca->na", self._features, self._noise)


def check_sde(use_sde: bool, action_space: Space) -> None:
    """Raise ValueError if ``use_sde`` is True and the actions are not Box."""
    if use_sde and not isinstance(action_space, spaces.Box):
        raise ValueError(
            f"use_sde=True (--use-sde) requires Box actions, got {action_space}; leave use_sde out"
        )


def mean_action_std(log_std: Tensor) -> Tensor:
    """Return the mean standard deviation of actions, given the log deviations of a policy.

    Those of independent noise have the shape (A,), or all dimensions share one number. Those of
    `StateDependentNoise` have the shape (C, A), and the result is for features of variance 1.
    """
    return torch.atleast_2d((2 * log_std).exp()).sum(0).sqrt().mean()
