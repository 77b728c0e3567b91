"""Search spaces: the options of a training command that a sweep chooses, and their ranges.

Options are written as in a settings file, with their full names, e.g. ``core.memory.length``.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.trial import Trial

from rlxf.utils.names import plain_name

STEP_TOLERANCE = 1e-9
"""Rounding error of a number of steps between two bounds, as in Optuna."""
MAX_INT = 10**18
"""Largest absolute value of a bound."""
Condition = Mapping[str, tuple[str, ...]]
"""Name of another option -> labels of its values with which an option is used."""
Case = tuple[str, Any]
"""Name of an option, and the label of one of its choices; None for any number of a range."""


def label(value: Any) -> str | float | int | bool:
    """Return a value as Optuna stores it: lists and tables become JSON texts."""
    return value if isinstance(value, str | int | float | bool) else json.dumps(value, sort_keys=True)


def holds(name: str, value: Any, labels: Sequence[Any]) -> bool:
    """Return whether a value of an option has one of the labels in a condition.

    Texts of a core are compared as names of techniques on the command line: case, dashes and underscores are
    ignored.

    Args:
        name: full name of the option.
        value: its value.
        labels: labels of values.
    """
    return any(_plain(name, label(value)) == _plain(name, each) for each in labels)


def _plain(name: str, given: Any) -> Any:
    return plain_name(given) if name.startswith("core.") and isinstance(given, str) else given


@dataclass(frozen=True)
class Choices:
    """Values of an option without an order.

    Args:
        values: the values.
        when: values of other options with which the option is used; by default it always is.
    """

    values: tuple[Any, ...]
    when: Condition = field(default_factory=dict)

    def suggest(self, trial: "Trial", name: str) -> Any:
        """Return the suggestion of Optuna for the option of this name."""
        return trial.suggest_categorical(name, [label(value) for value in self.values])

    def contains(self, suggestion: Any) -> bool:
        """Return whether Optuna can suggest this."""
        return any(_same(label(value), suggestion) for value in self.values)

    def option(self, suggestion: Any) -> Any:
        """Return the value of the option for a suggestion."""
        return next(value for value in self.values if _same(label(value), suggestion))

    def suggestion(self, name: str, given: Any) -> Any:
        """Return the suggestion for a label in a condition on the option of this name; None without one."""
        return next((label(value) for value in self.values if holds(name, value, [given])), None)

    def cases(self) -> list[Any]:
        """Return the labels of all choices."""
        return [label(value) for value in self.values]

    def draw(self, rng: random.Random) -> Any:
        """Return a random suggestion."""
        return label(rng.choice(self.values))

    def as_json(self) -> Any:
        """Return the range as a JSON value."""
        return {"choices": list(self.values)} | _condition_json(self.when)


@dataclass(frozen=True)
class Range:
    """Numbers between two bounds, which are included.

    Args:
        low: lower bound.
        high: upper bound. If both are int, so are the values.
        log: draw from the logarithmic domain.
        step: difference between neighbors; None for any number.
        format: text of the option with ``{}`` for the number, e.g. "linear:{}:0"; None for the number itself.
        when: as in `Choices`.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None
    format: str | None = None
    when: Condition = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """True if the values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def suggest(self, trial: "Trial", name: str) -> Any:
        """Return the suggestion of Optuna for the option of this name."""
        if self.whole:
            return trial.suggest_int(name, self.low, self.high, step=self.step or 1, log=self.log)  # type: ignore[arg-type]
        return trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log)

    def contains(self, suggestion: Any) -> bool:
        """Return whether Optuna can suggest this."""
        number = type(suggestion) is int if self.whole else type(suggestion) in (int, float)
        return number and self.low <= suggestion <= self.high

    def option(self, suggestion: Any) -> Any:
        """Return the value of the option for a suggestion; numbers have six significant digits."""
        number = suggestion if self.whole else min(max(float(f"{suggestion:.6g}"), self.low), self.high)
        return number if self.format is None else self.format.replace("{}", str(number))

    def suggestion(self, name: str, given: Any) -> Any:
        """Return the suggestion for a label in a condition on the option of this name; None without one.

        Only whole numbers, and numbers with a step, without a format, can be compared.
        """
        step = 1 if self.whole and self.step is None else self.step
        if step is None or self.format is not None or type(given) not in (int, float):
            return None
        steps = (given - self.low) / step
        is_step = self.low <= given <= self.high and abs(steps - round(steps)) < STEP_TOLERANCE
        return (int(given) if self.whole else given) if is_step else None

    def cases(self) -> list[Any]:
        """Return [None], which stands for any number."""
        return [None]

    def draw(self, rng: random.Random) -> Any:
        """Return a random suggestion."""
        if self.log:
            number = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
            return round(number) if self.whole else min(max(number, self.low), self.high)
        step = 1 if self.whole and self.step is None else self.step
        if step is None:
            return rng.uniform(self.low, self.high)
        steps = int((self.high - self.low) / step + STEP_TOLERANCE)
        return min(self.low + step * rng.randint(0, steps), self.high)

    def as_json(self) -> Any:
        """Return the range as a JSON value."""
        keys = ("low", "high", "log", "step", "format")
        given = {key: value for key in keys if (value := getattr(self, key)) not in (None, False)}
        return given | {"low": self.low, "high": self.high} | _condition_json(self.when)


def _condition_json(when: Condition) -> dict[str, Any]:
    return {"when": {name: list(labels) for name, labels in when.items()}} if when else {}


def _same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and first == second


Dimension = Choices | Range


@dataclass(frozen=True)
class SearchSpace:
    """Ranges of the options that a sweep chooses.

    Args:
        options: full name of an option -> its values.
    """

    options: Mapping[str, Dimension]

    def suggest(self, trial: "Trial", fixed: Mapping[str, Any]) -> dict[str, Any]:
        """Return name -> value of the options that Optuna suggests for a trial.

        Options whose condition does not hold are left out.

        Args:
            trial: the trial.
            fixed: name -> value of the options that are not searched.
        """
        return self._values(lambda name, dimension: dimension.suggest(trial, name), fixed)

    def restore(self, suggestions: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
        """Return name -> value of the options of an earlier trial.

        Args:
            suggestions: name -> suggestion, as stored by Optuna.
            fixed: name -> value of the options that are not searched.

        Raises:
            ValueError: if a suggestion is missing or outside of its range.
        """

        def stored(name: str, dimension: Dimension) -> Any:
            if name not in suggestions:
                raise ValueError(f"it has no value of {name}")
            if not dimension.contains(suggestions[name]):
                raise ValueError(f"it has {name} = {suggestions[name]!r}, which is not in the search space")
            return suggestions[name]

        return self._values(stored, fixed)

    def draw(self, fixed: Mapping[str, Any], seed: int, case: Case | None = None) -> dict[str, Any]:
        """Return name -> value of random options.

        Args:
            fixed: name -> value of the options that are not searched.
            seed: seed of the values.
            case: an option with one of its choices, which the result has together with values of other
                options with which it is used. Values of these are replaced only if they do not satisfy the
                condition. All other options are drawn.
        """
        rng, replacements = random.Random(seed), random.Random(seed)
        allowed = (self._allowed(case, fixed) if case else None) or {}

        def suggestion(name: str, dimension: Dimension) -> Any:
            drawn, choices = dimension.draw(rng), allowed.get(name)
            return replacements.choice(choices) if choices and drawn not in choices else drawn

        return self._values(suggestion, fixed)

    def cases(self, fixed: Mapping[str, Any]) -> list[Case]:
        """Return all options with each of their choices, or None for a range, if their condition can hold.

        Args:
            fixed: name -> value of the options that are not searched.
        """
        named = ((name, each) for name, dimension in self.options.items() for each in dimension.cases())
        return [case for case in named if self._allowed(case, fixed) is not None]

    def _allowed(self, case: Case, fixed: Mapping[str, Any]) -> dict[str, list[Any]] | None:
        """Return name -> suggestions of the options that a case restricts; None if it never occurs."""
        name, chosen = case
        allowed = {} if chosen is None else {name: [chosen]}
        for other, labels in self.options[name].when.items():
            if other in self.options:
                found = (self.options[other].suggestion(other, each) for each in labels)
                allowed[other] = [each for each in found if each is not None]
            if not allowed.get(other) and not holds(other, fixed.get(other), labels):
                return None
        return allowed

    def cases_in(self, values: Mapping[str, Any]) -> set[Case]:
        """Return the cases in a combination, as returned by `draw`."""
        return {
            (name, label(value) if isinstance(self.options[name], Choices) else None)
            for name, value in values.items()
        }

    def _values(
        self, suggestion: Callable[[str, Dimension], Any], fixed: Mapping[str, Any]
    ) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, dimension in self._in_order():
            known = {**fixed, **values}
            if all(holds(other, known.get(other), labels) for other, labels in dimension.when.items()):
                values[name] = dimension.option(suggestion(name, dimension))
        return values

    def _in_order(self) -> Iterator[tuple[str, Dimension]]:
        """Yield options without a condition before those that depend on them."""
        yield from ((name, each) for name, each in self.options.items() if not each.when)
        yield from ((name, each) for name, each in self.options.items() if each.when)

    def as_json(self) -> dict[str, Any]:
        """Return the ranges as a JSON object."""
        return {name: dimension.as_json() for name, dimension in self.options.items()}


def check_range(low: Any, high: Any, log: Any, step: Any) -> None:
    """Raise ValueError, with the end of a sentence as its message, unless these make a `Range`."""
    for key, bound in (("low", low), ("high", high)):
        if type(bound) not in (int, float) or not math.isfinite(bound) or abs(bound) > MAX_INT:
            raise ValueError(f"must have numbers low and high, got {key} = {bound!r}")
    if low >= high:
        raise ValueError(f"must have low < high, got low = {low} and high = {high}")
    if type(log) is not bool:
        raise ValueError(f"must have log = true or false, got {log!r}")
    if log and low <= 0:
        raise ValueError(f"must have low > 0 with log = true, got low = {low}")
    if step is not None:
        _check_step(low, high, log, step)


def _check_step(low: float, high: float, log: bool, step: Any) -> None:
    whole = type(low) is type(high) is int
    if type(step) not in ((int,) if whole else (int, float)) or not 0 < step <= high - low:
        raise ValueError(
            f"must have a step from 0 to high - low, a whole one for whole numbers, got {step!r}"
        )
    if log:
        raise ValueError("must not have both log and step")
