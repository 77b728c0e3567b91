"""Schedules of Stable-Baselines3: conversion to JSON and to command-line text, and cosine annealing.

A schedule is a function of the remaining progress, which decreases from 1 at the start of training to 0 at
the end. Learning rate, clip range and entropy coefficient are numbers or schedules.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule

Schedule = Callable[[float], float]
"""Hyperparameter as a function of the remaining fraction of the training, from 1 to 0, as in SB3."""


@dataclass(frozen=True)
class CosineSchedule:
    """Cosine annealing without restarts.

    The value at remaining progress p is ``w start + (1 - w) end`` with ``w = (1 + cos(pi (1 - p))) / 2``.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5.

    Args:
        start: value at the start of training.
        end: value at the end of training.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is not finite.
    """

    start: float
    end: float

    def __post_init__(self) -> None:
        _finite(self.start)
        _finite(self.end)

    def __call__(self, progress_remaining: float) -> float:
        """Return the value at a remaining progress; below 0, as at 0."""
        wave = (1 + math.cos(math.pi * (1 - max(progress_remaining, 0.0)))) / 2
        return wave * self.start + (1 - wave) * self.end


class UnknownSchedule:
    """Placeholder for a user-defined schedule, which a checkpoint cannot contain.

    It only has the value at the start of training (remaining progress 1), with which the optimizer is
    constructed. An agent with this placeholder can be loaded and evaluated, but not trained.

    Args:
        start: value of the user-defined schedule at remaining progress 1.
    """

    def __init__(self, start: float):
        self.start = start

    def __call__(self, progress_remaining: float) -> float:
        """Return ``start`` at remaining progress 1.

        Raises:
            ValueError: at any other progress.
        """
        if progress_remaining != 1:
            raise ValueError(
                "the agent was trained with a user-defined schedule, which a checkpoint cannot contain;"
                " pass this schedule again when loading, e.g. learning_rate=..."
            )
        return self.start


def schedule_to_json(value: float | Schedule | None) -> dict[str, Any] | float | None:
    """Convert a number, a schedule or None to JSON; of a user-defined function, only the start value is kept.

    Raises:
        TypeError: if ``value`` is not a number, a callable or None.
        ValueError: if a number of the schedule is not finite.
    """
    if isinstance(value, FloatSchedule):
        return schedule_to_json(value.value_schedule)
    if value is None:
        return None
    if not callable(value):
        return _finite(value)
    if isinstance(value, ConstantSchedule):
        return {"name": "constant", "value": _finite(value.val)}
    if isinstance(value, LinearSchedule):
        return {"name": "linear", **{key: _finite(number) for key, number in vars(value).items()}}
    if isinstance(value, CosineSchedule):
        return {"name": "cosine", "start": float(value.start), "end": float(value.end)}
    return {"name": "custom", "start": _finite(value(1.0))}


def schedule_from_json(data: dict[str, Any] | float | None) -> float | Schedule | None:
    """Build the schedule that `schedule_to_json` described; a user-defined function becomes
    `UnknownSchedule`.

    Raises:
        ValueError: if ``data`` does not describe a schedule.
    """
    if data is None:
        return None
    try:
        if not isinstance(data, dict):
            return _finite(data)
        fields = dict(data)
        if fields.get("name") not in _SCHEDULES:
            raise ValueError(f"its name must be one of {', '.join(_SCHEDULES)}")
        return _SCHEDULES[fields.pop("name")](**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{data!r} does not describe a schedule ({error})") from error


def check_schedule(name: str, value: Any, progress: float = 1.0) -> None:
    """Check that a number, or the value of a schedule, is finite and at least 0.

    Args:
        name: name of the setting.
        value: number, or function of the remaining progress.
        progress: remaining progress at which a function is evaluated: 1 at the start, 0 at the end.

    Raises:
        TypeError: if the value is not a number.
        ValueError: if it is negative or not finite.
    """
    given = value(progress) if callable(value) else value
    if isinstance(given, bool | str) or not hasattr(given, "__float__"):
        raise TypeError(f"{name} must be a number or a function of the progress remaining, got {given!r}")
    if not 0 <= given < math.inf:
        raise ValueError(f"{name} must be finite and at least 0, got {given} at progress {progress:g}")


def is_custom_schedule(value: Any) -> bool:
    """Return whether a setting is a user-defined function, or the placeholder of one."""
    described = schedule_to_json(value)
    return isinstance(described, dict) and described["name"] == "custom"


def parse_schedule(text: str) -> float | Schedule:
    """Parse a schedule of the command line: ``"1e-3"`` is constant, ``"linear:1e-3:0"`` decreases to 0.

    ``"linear:START:END:FRACTION"`` reaches END after this fraction of training; ``"cosine:START:END"`` is a
    `CosineSchedule`.

    Raises:
        ValueError: if the text has a different form.
    """
    name, *numbers = text.split(":")
    try:
        if not numbers:
            return _finite(float(name))
        return _WRITABLE[name](*map(float, numbers))
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"a schedule is NUMBER or linear:START:END[:FRACTION] or cosine:START:END, got {text!r}"
        ) from error


def schedule_to_text(value: float | Schedule) -> float | str:
    """Return a number, or the text of a schedule for `parse_schedule`, such as ``"linear:0.001:0.0"``.

    A user-defined function gives ``"custom:START"``, which `parse_schedule` does not accept.
    """
    if not callable(value):
        return _finite(value)
    described = schedule_to_json(value)
    assert isinstance(described, dict)
    name, *numbers = described.values()
    if name == "constant":
        return float(numbers[0])
    if name == "linear" and numbers[-1] == 1:
        numbers.pop()
    return ":".join(map(str, [name, *numbers]))


def linear(start: float, end: float, end_fraction: float = 1.0) -> LinearSchedule:
    """Return a linear schedule from ``start`` to ``end``, constant after ``end_fraction`` of training.

    Raises:
        ValueError: if a number is not finite or ``end_fraction`` is not in (0, 1].
    """
    if not 0 < end_fraction <= 1:
        raise ValueError(f"end_fraction must be in (0, 1], got {end_fraction}")
    return LinearSchedule(_finite(start), _finite(end), _finite(end_fraction))


def _finite(value: Any) -> float:
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise TypeError(f"a schedule is a number or a function of the remaining progress, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"a schedule must be finite, got {value!r}")
    return float(value)


_WRITABLE: dict[str, Callable[..., Schedule]] = {"linear": linear, "cosine": CosineSchedule}
_SCHEDULES = {
    "constant": lambda value: ConstantSchedule(_finite(value)),
    **_WRITABLE,
    "custom": lambda start: UnknownSchedule(_finite(start)),
}
