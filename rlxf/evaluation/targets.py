"""Returns to ask an agent for."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

from rlxf.envs.return_to_go import is_return_conditioned


def checked_targets(targets: Sequence[float], data_range: tuple[float, float] | None) -> list[float]:
    """The targets as floats; warns of those that lie outside of what the data hold.

    Raises:
        ValueError: if there is none, one is not finite, or one is there twice.
    """
    values = [float(target) for target in targets]
    if not values or not all(map(math.isfinite, values)) or len(set(values)) < len(values):
        raise ValueError(f"target_returns must be finite numbers, each of them once, got {list(targets)}")
    if data_range is not None:
        _warn_outside(values, *data_range)
    return values


def check_takes_targets(agent: Any) -> None:
    """Raise ValueError if the agent is known not to be conditioned on a return.

    Conditioned are agents that learned from data, and all whose observations are those of `ReturnToGo`.
    """
    seen = getattr(agent, "observation_space", None)
    if data_range(agent) is None and seen is not None and not is_return_conditioned(seen):
        raise ValueError(
            f"target_returns are for agents that are conditioned on a return, such as DecisionTransformer, "
            f"which {type(agent).__name__} is not: leave target_returns out"
        )


def data_range(agent: Any) -> tuple[float, float] | None:
    """Smallest and largest return of an episode in the data that the agent learned from; None if unknown."""
    return getattr(agent, "return_range", None)


def _warn_outside(targets: list[float], low: float, high: float) -> None:
    outside = [target for target in targets if not low <= target <= high]
    if outside:
        warnings.warn(
            f"target returns {', '.join(f'{target:g}' for target in outside)} lie outside of the data, whose "
            f"episodes return {low:g} to {high:g}: what the agent does then was never seen",
            stacklevel=4,
        )
