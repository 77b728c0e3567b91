"""Warnings about training data whose statistics do not fit their arrays or the agent."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch import nn

from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.trajectory_model import default_return_scale
from rlxf.data import Trajectories
from rlxf.data.running_stats import add_observations, observation_stats
from rlxf.data.trajectories import Standardize
from rlxf.utils.warnings import warn_user

SAMPLED_STEPS, LEAST_SAMPLED_STEPS = 100_000, 1_000
"""Largest number of steps from which the moments of observations are estimated, and that of wide ones."""
SAMPLED_NUMBERS = 2**24
"""Largest number of values in the sampled steps, if these are more than `LEAST_SAMPLED_STEPS`."""
LARGE_RATIO = 10
"""Ratio of standard deviations or returns from which scales differ clearly."""
LARGE_SHIFT = 3
"""Difference of means, in standard deviations, from which they differ clearly."""
Moments = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Mean and standard deviation of observations, (D,) or (C, H, W) each."""


def warn_of_other_returns(trajectories: Trajectories) -> None:
    """Warn if the returns-to-go are not those of the rewards, e.g. because only one of them was replaced."""
    returns, ends = trajectories.return_to_go.astype(np.float64), trajectories.offsets[1:] - 1
    later = np.append(returns[1:], 0.0)
    later[ends] = 0.0
    error = np.abs(returns - later - trajectories.rewards)
    steps = np.flatnonzero(error > 1e-6 * np.maximum(np.abs(returns), np.abs(later)) + 1e-6)
    if len(steps):
        step = int(steps[0])
        warn_user(
            f"the rewards and the returns-to-go of the data differ in {len(steps):,} steps: in step {step}, "
            f"the reward is {trajectories.rewards[step]:g}, and the return-to-go changes by "
            f"{returns[step] - later[step]:g}. Agents learn from either; to replace both, use "
            f"Trajectories.with_rewards(rewards)"
        )


def warn_of_other_moments(trajectories: Trajectories) -> None:
    """Warn if mean and std are clearly not those of the observations, e.g. because only these were replaced.

    They are compared with up to `SAMPLED_STEPS` random steps. Loaded trajectories are not checked.
    """
    stored = trajectories.observation_mean, trajectories.observation_std
    stats = observation_stats(trajectories.encoder)
    if trajectories.loaded or stats is None or stored[0] is None or stored[1] is None:
        return
    add_observations(stats, trajectories.observations[_sampled_steps(trajectories)])
    found = stats.mean.astype(np.float32), stats.std
    if difference := _describe_difference((stored[0], stored[1]), found, stats.constant, stats.constant_std):
        warn_user(
            f"observation_mean and observation_std of the data are not those of the observations: "
            f"{difference}. Agents normalize with the stored ones; to replace observations and both, use "
            f"Trajectories.with_observations(observations)"
        )


def _sampled_steps(trajectories: Trajectories) -> NDArray[np.int64]:
    """Return random steps in ascending order, the same ones for each call, (n,).

    Evenly spaced steps would not show the moments of periodic features.
    """
    width = max(1, math.prod(trajectories.observations.shape[1:]))
    most = min(SAMPLED_STEPS, max(LEAST_SAMPLED_STEPS, SAMPLED_NUMBERS // width))
    steps = trajectories.steps
    return np.sort(np.random.default_rng(0).choice(steps, min(steps, most), replace=False, shuffle=False))


def warn_of_other_scales(
    info: DatasetInfo, normalization: nn.Module, return_scale: float | None, trajectories: Trajectories
) -> None:
    """Warn if a loaded agent is trained on data of a clearly different scale than its first data.

    Args:
        info: information about the first data.
        normalization: normalization of observations with the moments of the first data.
        return_scale: divisor of returns in the file; None if the agent does not use returns, or the caller
            chose the divisor.
        trajectories: the other data.
    """
    differences = [
        *_observation_differences(normalization, trajectories),
        *([] if return_scale is None else _return_differences(info, return_scale, trajectories)),
    ]
    if differences:
        warn_user(
            f"the agent keeps the scales of the data on which it was built, which differ from those of "
            f"{', '.join(trajectories.dataset_ids) or 'the data passed to load'}: {'; '.join(differences)}"
        )


def _observation_differences(normalization: nn.Module, trajectories: Trajectories) -> Iterator[str]:
    """Yield the difference of the moments of observations, if it is large."""
    mean, std = trajectories.observation_mean, trajectories.observation_std
    stats = observation_stats(trajectories.encoder)
    if not isinstance(normalization, Standardize) or stats is None or mean is None or std is None:
        return
    stored = normalization.mean.cpu().numpy(), normalization.std.cpu().numpy()
    constant = std.ravel() == stats.constant_std
    if difference := _describe_difference(stored, (mean, std), constant, stats.constant_std):
        yield f"of observations, {difference}; build a new agent to normalize with those of these data"


def _return_differences(info: DatasetInfo, return_scale: float, trajectories: Trajectories) -> Iterator[str]:
    """Yield the difference of the scale of returns, if returns differ clearly and the scale does not fit."""
    low, high = float(trajectories.returns.min()), float(trajectories.returns.max())
    before, now = max(map(abs, info.return_range)), max(abs(low), abs(high))
    scale = default_return_scale(trajectories)
    if _differ_clearly(before, now) and _differ_clearly(return_scale, scale):
        first, last = info.return_range
        yield (
            f"returns are {low:g} to {high:g}, those of the first data {first:g} to {last:g}, and the file "
            f"divides them by return_scale={return_scale:g}; pass return_scale={scale:.3g} to load to divide "
            f"by the scale of these data"
        )


def _differ_clearly(one: float, other: float) -> bool:
    return max(one, other) > LARGE_RATIO * min(one, other)


def _describe_difference(
    stored: Moments, found: Moments, constant: NDArray[np.bool_], constant_std: float
) -> str:
    """Describe where stored moments clearly differ from those of observations; empty if nowhere.

    A feature that is constant now, or was constant before and varies by less than ``constant_std``, stays
    small after normalization: its standard deviations are not compared.

    Args:
        stored: moments with which agents normalize.
        found: moments of the observations.
        constant: True for features that are constant in the observations, (D,).
        constant_std: standard deviation that stands for that of constant features.
    """
    (old_mean, old_std), (mean, std) = ([np.ravel(part) for part in pair] for pair in (stored, found))
    ratio = np.maximum(std / old_std, old_std / std)
    harmless = constant | ((old_std == constant_std) & (std < old_std))
    different = np.flatnonzero(
        ((ratio > LARGE_RATIO) & ~harmless) | (np.abs(mean - old_mean) > LARGE_SHIFT * old_std)
    )
    if not len(different):
        return ""
    first = int(different[0])
    return (
        f"{len(different)} of {len(mean)} features differ, and feature {first} has the mean {mean[first]:g} "
        f"and the standard deviation {std[first]:g}, but the stored ones are {old_mean[first]:g} and "
        f"{old_std[first]:g}"
    )
