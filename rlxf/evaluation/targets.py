"""Returns to ask an agent for."""

import math
import warnings
from collections.abc import Sequence
from typing import Any


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
