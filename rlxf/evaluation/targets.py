"""Target returns of return-conditioned agents."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

from rlxf.envs.wrappers.return_to_go import is_return_conditioned


def validate_targets(targets: Sequence[float], data_range: tuple[float, float] | None) -> list[float]:
    """Return the targets as floats; warn about those outside the range of returns in the data.

    Raises:
        ValueError: if there is no target, or a target is not finite or a duplicate.
    """
    values = [float(target) for target in targets]
    if not values or not all(map(math.isfinite, values)) or len(set(values)) < len(values):
        raise ValueError(
            f"target_returns must be one or more finite numbers without duplicates, got {list(targets)}"
        )
    if data_range is not None:
        _warn_outside(values, *data_range)
    return values


def check_return_conditioned(agent: Any) -> None:
    """Raise if the agent is known not to be conditioned on a return.

    Agents trained offline, and agents with the observation space of `ReturnToGo`, are conditioned.

    Raises:
        ValueError: if the agent is not conditioned on a return.
    """
    space = getattr(agent, "observation_space", None)
    if data_range(agent) is None and space is not None and not is_return_conditioned(space):
        raise ValueError(
            f"target_returns needs an agent that is conditioned on a return, such as DecisionTransformer, "
            f"got {type(agent).__name__}: leave target_returns out"
        )


def data_range(agent: Any) -> tuple[float, float] | None:
    """Return the smallest and the largest return of an episode in the agent's data; None if unknown."""
    return getattr(agent, "return_range", None)


def _warn_outside(targets: list[float], low: float, high: float) -> None:
    outside = [target for target in targets if not low <= target <= high]
    if outside:
        warnings.warn(
            f"target returns {', '.join(f'{target:g}' for target in outside)} are outside the range of "
            f"returns in the data, {low:g} to {high:g}: the agent must extrapolate",
            stacklevel=4,
        )
