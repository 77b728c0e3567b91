"""Sweep files: a training command, its fixed options, and the search space, in TOML."""

from collections.abc import Iterable, Mapping
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from rlxf.experiments.plan import COMMANDS
from rlxf.experiments.search_space import (
    Choices,
    Condition,
    Dimension,
    Range,
    SearchSpace,
    check_range,
    holds,
    label,
)
from rlxf.experiments.sweep_plan import DIRECTIONS, Pruning, SweepPlan, fixed_options, iterate_entries
from rlxf.experiments.toml_files import MAX_RUNS, PlanError, TomlReader, read_toml
from rlxf.utils.names import did_you_mean
from rlxf.utils.run_files import MEAN_RETURN

TRAINED = tuple(command for command in COMMANDS if command != "baseline random")
SPACES = ("gtrxl", "dt")
"""Search spaces that are part of the package, as spaces/NAME.toml."""
FIRST_KEYS = (
    *("command", "space", "trials", "seeds", "direction", "metric", "sampler_seed"),
    "pruning",
)
TABLES = ("settings", "search")
RANGE_KEYS = ("low", "high", "log", "step", "format", "when")
CHOICE_KEYS = ("choices", "when")


def read_sweep_plan(path: Path) -> SweepPlan:
    """Read a sweep file.

    Raises:
        PlanError: if the file is not TOML, or a key or a value is invalid.
        OSError: if the file cannot be read.
    """
    document, text = read_toml(path, "sweep file")
    return _Reader(path, text).plan(document)


def _overlaps(searched: str, fixed: str, value: Any) -> bool:
    """Return whether a fixed option is a searched one, or an entry of it that is no option of a technique."""
    if fixed == searched:
        return not isinstance(value, dict)
    return fixed.startswith(f"{searched}.") and not searched.startswith("core.")


def _listed(labels: Iterable[Any]) -> str:
    return " or ".join(map(repr, labels))


def _hint(searched: Dimension) -> str:
    """Return the values of an option that a condition can have, to be added to a message."""
    if isinstance(searched, Range):
        return (
            f" from low = {searched.low} and high = {searched.high}: conditions need choices, or a range of "
            f"whole numbers or with a step, without a format"
        )
    return f": the choices are {_listed(searched.cases())}"


class _Reader(TomlReader):
    """Conversion of a TOML document into a plan of a sweep."""

    setter = "the sweep"
    top_level_keys = FIRST_KEYS

    def plan(self, document: dict[str, Any]) -> SweepPlan:
        """Return the plan of a document."""
        self.check_keys(document, FIRST_KEYS + TABLES)
        command = self.command("", "", document, TRAINED)
        settings = self.options(document.get("settings", {}), "settings")
        needed = COMMANDS[command]
        if needed not in settings:
            self.check_spelling(settings, (needed,), "settings")
            raise self.error("settings", f"command {command} needs {needed}: add it to [settings]")
        if settings.get("episodes") == 0 and document.get("metric", MEAN_RETURN) == MEAN_RETURN:
            raise self.error(
                "settings.episodes",
                f"settings has episodes = 0, so no run has the metric {MEAN_RETURN}: give at least 1, or "
                f"choose another metric",
            )
        return SweepPlan(
            self.path,
            command,
            settings,
            self.space(document, settings),
            self.count("trials", document.get("trials", 20), 1),
            self.seeds(document.get("seeds", 1)),
            self.one_of("direction", document.get("direction", DIRECTIONS[0]), DIRECTIONS),
            self.metric(document.get("metric", MEAN_RETURN)),
            self.count("sampler_seed", document.get("sampler_seed", 0), 0),
            self.pruning(document.get("pruning", True)),
        )

    def space(self, document: dict[str, Any], settings: dict[str, Any]) -> SearchSpace:
        """Return the search space: that of the package without fixed options, and that of the file."""
        fixed = fixed_options(settings)
        options: dict[str, Dimension] = {}
        if "space" in document:
            shipped = _shipped(self.one_of("space", document["space"], SPACES))
            options = {name: each for name, each in shipped.items() if name not in fixed}
        searched = self.table(document.get("search", {}), "search")
        self.check_reserved(searched, "search")
        own = self.dimensions(searched)
        for name in own:
            if any(_overlaps(name, other, value) for other, value in fixed.items()):
                raise self.error(name, f"{name} is in both [settings] and [search]: remove one")
        options |= own
        if not options:
            raise PlanError(
                f"{self.path} has no options to search: add them to a table [search], or choose space = "
                f"{' or '.join(map(repr, SPACES))}"
            )
        for name, dimension in own.items():
            for other in dimension.when:
                self.check_condition(name, dimension, other, options, fixed)
        return SearchSpace(options)

    def dimensions(self, table: Mapping[str, Any], prefix: str = "") -> dict[str, Dimension]:
        """Return full name -> values of the options in a table."""
        found: dict[str, Dimension] = {}
        for key, value in table.items():
            is_option = not prefix or prefix.startswith("core")
            name = prefix + (key.replace("-", "_") if is_option else key)
            is_range = isinstance(value, dict) and set(value) & {*RANGE_KEYS, *CHOICE_KEYS}
            if not isinstance(value, dict) or is_range:
                each = {name: self.dimension(name, value)}
            else:
                each = self.dimensions(value, f"{name}.")
            if both := set(each) & set(found):
                raise self.error(min(both), f"search has {min(both)} twice, in two spellings: remove one")
            found |= each
        return found

    def dimension(self, name: str, value: Any) -> Dimension:
        """Return the values of an option."""
        if isinstance(value, list):
            return self.choices(name, value, {})
        if not isinstance(value, dict):
            raise self.error(
                name,
                f"search.{name} must be a list of choices, or a table such as {{ low = 1, high = 8 }}, got "
                f"{value!r}",
            )
        when = self.condition(name, value.get("when", {}))
        if "choices" in value:
            self.check_keys(value, CHOICE_KEYS, f"search.{name}")
            return self.choices(name, value["choices"], when)
        self.check_keys(value, RANGE_KEYS, f"search.{name}")
        return self.range(name, value, when)

    def choices(self, name: str, values: Any, when: Condition) -> Choices:
        """Return the choices in a list."""
        labels = [label(each) for each in values] if isinstance(values, list) and self.is_data(values) else []
        if not labels or len(set(labels)) < len(labels):
            raise self.error(
                name,
                f"search.{name} must be a list of different texts, numbers or true and false, got {values!r}",
            )
        return Choices(tuple(values), when)

    def is_data(self, value: Any) -> bool:
        """Return whether a value is a text, a finite number, a boolean, or a list or table of them."""
        if isinstance(value, list | dict):
            return all(map(self.is_data, value.values() if isinstance(value, dict) else value))
        return isinstance(value, str | int) or (isinstance(value, float) and isfinite(value))

    def range(self, name: str, value: Mapping[str, Any], when: Condition) -> Range:
        """Return the numbers that a table describes."""
        low = value.get("low")
        high = value.get("high")
        log = value.get("log", False)
        try:
            check_range(low, high, log, value.get("step"))
        except ValueError as error:
            raise self.error(name, f"search.{name} {error}") from None
        form = value.get("format")
        if form is not None and (not isinstance(form, str) or form.count("{}") != 1):
            raise self.error(name, f"format of search.{name} must be a text with one {{}}, got {form!r}")
        return Range(low, high, log, value.get("step"), form, when)  # type: ignore[arg-type]

    def condition(self, name: str, when: Any) -> Condition:
        """Return the condition in the key ``when`` of an option."""
        if not isinstance(when, dict):
            raise self.error(
                name, f"when of search.{name} must be a table such as {{ option = value }}, got {when!r}"
            )
        return {
            other.replace("-", "_"): tuple(map(label, values if isinstance(values, list) else [values]))  # type: ignore[arg-type]
            for other, values in iterate_entries(when)
            if not isinstance(values, dict)
        }

    def check_condition(
        self,
        name: str,
        dimension: Dimension,
        other: str,
        options: Mapping[str, Dimension],
        fixed: Mapping[str, Any],
    ) -> None:
        """Raise PlanError if the condition of an option on another one names no option, or never holds.

        Args:
            name: name of the option.
            dimension: its values, with the condition.
            other: name of the other option.
            options: all options that are searched.
            fixed: name -> value of the other options.
        """
        labels = dimension.when[other]
        start = f"when of search.{name}"
        if other not in options and other not in fixed:
            hint = did_you_mean(other, {*options, *fixed})
            raise self.error(name, f"{start} names {other}, which is neither fixed nor searched{hint}")
        if other not in options and not holds(other, fixed[other], labels):
            given = f"[settings] has {other} = {fixed[other]!r}, not {_listed(labels)}"
            raise self.error(name, f"{start} never holds: {given}; correct it, or remove the option")
        if other in options:
            self.check_searched_condition(name, start, other, labels, options[other])

    def check_searched_condition(
        self, name: str, start: str, other: str, labels: tuple[Any, ...], searched: Dimension
    ) -> None:
        """Raise PlanError if a searched option has a condition itself, or not all values of a condition."""
        if searched.when:
            raise self.error(name, f"{start} names {other}, which has a condition itself")
        if not labels:
            raise self.error(name, f"{start} has no value of {other}: give at least one")
        for value in labels:
            if searched.suggestion(other, value) is None:
                raise self.error(
                    name, f"{start} has {other} = {value!r}, which is never suggested{_hint(searched)}"
                )

    def count(self, key: str, value: Any, low: int) -> int:
        """Return a whole number of at least ``low``."""
        if type(value) is not int or not low <= value <= MAX_RUNS:
            raise self.error(key, f"{key} must be a whole number from {low} to {MAX_RUNS:,}, got {value!r}")
        return value

    def one_of(self, key: str, value: Any, known: tuple[str, ...]) -> str:
        """Return a value after a check that it is one of the known ones."""
        if value not in known:
            hint = did_you_mean(str(value), known)
            raise self.error(key, f"{key} must be {' or '.join(known)}, got {value!r}{hint}")
        return str(value)

    def metric(self, value: Any) -> str:
        """Return the name of the objective."""
        if not isinstance(value, str) or not value:
            raise self.error(
                "metric", f"metric must be the name of a metric, e.g. {MEAN_RETURN!r}, got {value!r}"
            )
        return value

    def pruning(self, value: Any) -> Pruning | None:
        """Return when trials are stopped early, from true, false or a table."""
        if isinstance(value, bool):
            return Pruning() if value else None
        table = self.table(value, "pruning")
        self.check_keys(table, ("startup_trials", "warmup"), "pruning")
        warmup = table.get("warmup", Pruning.warmup)
        if type(warmup) not in (int, float) or not 0 <= warmup <= 1:
            raise self.error("pruning.warmup", f"pruning.warmup must be a number from 0 to 1, got {warmup!r}")
        startup = table.get("startup_trials", Pruning.startup_trials)
        return Pruning(self.count("pruning.startup_trials", startup, 1), warmup)


def _shipped(name: str) -> dict[str, Dimension]:
    """Return the search space of this name in the package."""
    path = Path(str(files("rlxf.experiments") / "spaces" / f"{name}.toml"))
    document, text = read_toml(path, "search space")
    return _Reader(path, text).dimensions(document)
